"""Sets the rank by which lightning_utilities' rank-zero helpers decide whether a process is rank 0."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from drivetrain.errors import ConfigurationError

_MODULE = "lightning_utilities.core.rank_zero"


def set_utilities_rank(rank: int) -> None:
    """Set ``rank_zero_only.rank`` of lightning_utilities in this process, now or when the library is imported."""
    module: Any = sys.modules.get(_MODULE)
    if module is not None:
        module.rank_zero_only.rank = rank
    else:
        _Loader.rank = rank


def set_rank_on_import() -> None:
    """Let the first import of lightning_utilities set the rank that the environment gives, or 0.

    The library itself takes 30 ms to import, so it is not imported here. A rank that is set already is kept.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is not None:
        if getattr(module.rank_zero_only, "rank", None) is None:
            module.rank_zero_only.rank = _rank_of_environment()
        return
    spec = find_spec("lightning_utilities")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        # Python asks this finder for the modules of the one folder, and for no others.
        core = os.path.join(folder, "core")
        sys.path_importer_cache[core] = _Finder(core, (SourceFileLoader, SOURCE_SUFFIXES))


class _Finder(FileFinder):
    """Finds the modules of a folder, and loads the one module so that it knows the rank."""

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(name, target)
        if spec is not None and name == _MODULE and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads the one module, and sets its rank."""

    rank: int | None = None
    """The rank that a launcher has set; None if the environment determines the rank."""

    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        module.rank_zero_only.rank = _rank_of_environment() if self.rank is None else self.rank


def _rank_of_environment() -> int:
    from drivetrain.environments.detection import detect_environment  # only programs that use the library need it

    environment = detect_environment()
    try:
        return environment.placement().rank if environment.started_processes else 0
    except ConfigurationError:  # the run will report the incomplete variables
        return 0
