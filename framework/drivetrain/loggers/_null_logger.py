"""A logger that keeps nothing: it stands in for the run's own ones where nothing is to be logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from drivetrain.loggers.logger import Logger


class NullLogger(Logger):
    """Takes every call, that of other loggers' methods too: a step that logs an image by one goes on undisturbed."""

    @property
    def name(self) -> str:
        return "silent"

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        return _Nothing()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        del metrics, step

    def _cannot_keep(self, what: str) -> None:
        del what  # nothing is kept, and nobody is told

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling look for
            raise AttributeError(name)
        return _Nothing()


class _Nothing:
    """What a silent logger's attributes are, and their attributes, and what their calls return."""

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
