"""Sets the rank by which lightning_utilities' rank-zero helpers decide whether a process is rank 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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
        _Finder.rank = rank


def set_rank_on_import() -> None:
    """Let the first import of lightning_utilities set the rank that the environment gives, or 0.

    The library itself takes 30 ms to import, so it is not imported here. A rank that is set already is kept.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is None:
        sys.meta_path.insert(0, _Finder())
    elif getattr(module.rank_zero_only, "rank", None) is None:
        module.rank_zero_only.rank = _rank_of_environment()


class _Finder(MetaPathFinder):
    """Finds the one module as the other finders do, and adds the rank after its import."""

    rank: int | None = None
    """The rank that a launcher has set; None if the environment determines the rank."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_set_rank(module: Any) -> None:
                execute(module)
                module.rank_zero_only.rank = _rank_of_environment() if self.rank is None else self.rank

            loader.exec_module = execute_and_set_rank
        return spec


def _rank_of_environment() -> int:
    from drivetrain.environments.detection import detect_environment  # only programs that use the library need it

    environment = detect_environment()
    try:
        return environment.placement().rank if environment.started_processes else 0
    except ConfigurationError:  # the run will report the incomplete variables
        return 0
