"""NullLogger and NullObject: replace loggers, and objects of logging libraries, when nothing should be logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from drivetrain.loggers.logger import Logger


class NullLogger(Logger):
    """Accepts every call and does nothing, including calls of methods that only some loggers have."""

    @property
    def name(self) -> str:
        return "silent"

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        return NullObject()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        del metrics, step

    def _warn_unsupported(self, media: str) -> None:
        del media

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Such names are looked up by copy and pickle.
            raise AttributeError(name)
        return NullObject()


class NullObject:
    """Replaces a library's object. All attributes, items and call results are the `NullObject` itself."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Self:
        return self

    def __getitem__(self, key: Any) -> Self:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        del key, value
