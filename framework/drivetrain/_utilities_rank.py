"""Sets the rank by which lightning_utilities' rank-zero helpers decide whether a process is rank 0."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from drivetrain.errors import ConfigurationError

_MODULE = "lightning_utilities.core.rank_zero"

_launched_rank: int | None = None  # None if the environment determines the rank


def set_utilities_rank(rank: int) -> None:
    """Set ``rank_zero_only.rank`` of lightning_utilities in this process, now or when the library is imported."""
    global _launched_rank
    _launched_rank = rank
    if _MODULE in sys.modules:
        _set_rank(sys.modules[_MODULE])


def set_rank_on_import() -> None:
    """Let the first import of lightning_utilities set the rank that the environment gives, or 0.

    The library itself takes 30 ms to import, so it is not imported here. A rank that is set already is kept.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is not None and getattr(module.rank_zero_only, "rank", None) is None:
        _set_rank(module)
    package = find_spec("lightning_utilities") if module is None else None
    if package is not None and isinstance(package.loader, SourceFileLoader):
        # Python asks this finder for the modules of this one folder only, so that other imports do not become slower.
        folder = os.path.join(os.path.dirname(package.loader.path), "core")
        sys.path_importer_cache[folder] = FileFinder(folder, (_Loader, SOURCE_SUFFIXES))


class _Loader(SourceFileLoader):
    """Loads a module as usual, and then sets the rank."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self.name == _MODULE:
            _set_rank(module)


def _set_rank(module: Any) -> None:
    from drivetrain.environments.detection import rank_of_environment  # only programs that use the library need it

    rank = _launched_rank
    if rank is None:
        try:
            rank = rank_of_environment()
        except ConfigurationError:  # the run will report the incomplete variables
            rank = 0
    module.rank_zero_only.rank = rank
