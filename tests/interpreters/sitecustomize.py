"""Python imports this at start-up in every process that a test starts, through the PYTHONPATH of tests/conftest.py.

It saves two thirds of their time: garbage collection of the permanent objects of torch's import, and the import of
torch's compiler, which is as large as torch itself, by an optimizer's first step.
"""

from __future__ import annotations

import atexit
import gc
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

gc.set_threshold(50_000, 10, 10)
atexit.register(gc.freeze)

_COMPILER = "torch._dynamo"

# Calls by which eager code configures or queries the compiler, which gets the configuration once it is imported.
_MESSAGES = {
    "graph_break",
    "trace_rules.LEGACY_MOD_INLINELIST.add",
    "trace_rules.clear_lru_cache",
    "trace_rules.get_legacy_mod_inlinelist.cache_clear",
    "utils.get_optimize_ddp_mode",
}


class _Compiler(ModuleType):
    """``torch._dynamo``, executed at its first use other than these calls."""

    def __getattr__(self, name: str) -> Any:
        with _executing:
            if type(self) is _Compiler:
                if name == "disable":
                    return self._disable
                if any(message.split(".")[0] == name for message in _MESSAGES):
                    return _Part(self, name)
                self.execute()
        return getattr(self, name)

    def _disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **options: Any) -> Any:
        if wrapping or options:
            self.execute()
            return getattr(self, "disable")(fn, recursive, wrapping=wrapping, **options)  # noqa: B009
        # torch._compile calls it, and keeps the answer as an attribute of the function.
        _disabled.append((fn, recursive))
        return fn

    def execute(self) -> None:
        if type(self) is not _Compiler:
            return
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        self.__path__ = self.__spec__.submodule_search_locations  # type: ignore[assignment]  # a package has some
        self.__loader__.loader.exec_module(self)  # type: ignore[union-attr]
        for message, args in _told:
            operator.attrgetter(message)(self)(*args)
        for fn, recursive in _disabled:
            fn.__dynamo_disable = self.disable(fn, recursive, wrapping=False)  # type: ignore[attr-defined]


class _Part:
    """An attribute, given by its path, of the compiler that is not imported yet."""

    def __init__(self, compiler: _Compiler, path: str) -> None:
        self._compiler = compiler
        self._path = path

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        if any(f"{message}.".startswith(f"{path}.") for message in _MESSAGES):
            return _Part(self._compiler, path)
        self._compiler.execute()
        return operator.attrgetter(path)(self._compiler)

    def __call__(self, *args: Any) -> Any:
        if self._path not in _MESSAGES:
            self._compiler.execute()
            return operator.attrgetter(self._path)(self._compiler)(*args)
        if args:
            _told.append((self._path, args))
        return None


class _OnDemand(Loader):
    """Finds the compiler, and lets Python create its module without executing it."""

    loader: Loader

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COMPILER else None
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python creates an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Compiler
        del module.__path__  # so that importing one of its submodules counts as a use


_executing = threading.RLock()
_told: list[tuple[str, tuple[Any, ...]]] = []
_disabled: list[tuple[Callable[..., Any], bool]] = []
sys.meta_path.insert(0, _OnDemand())
