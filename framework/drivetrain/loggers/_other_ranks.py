"""Loggers on ranks above 0: there, yet what they are asked to keep goes nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from drivetrain.loggers.logger import Logger


def silence_loggers(loggers: Iterable[Logger], quiet: bool) -> None:
    """Let loggers do nothing when they are asked to keep something, or let them keep it again.

    A hook runs on every rank, and `self.logger.log_image(...)` in it shall reach the store once. The objects stay what
    they are: of their class, by ``isinstance``, with their names and folders.

    Args:
        loggers: of this process.
        quiet: whether it is a rank above 0.
    """
    for one in loggers:
        kind = type(one)
        if quiet != (kind in _BEFORE):
            # Another layout of the object, by __slots__, is its author's choice; it is called then as it was.
            with suppress(TypeError):
                one.__class__ = _quiet_kind(kind) if quiet else _BEFORE[kind]


_BEFORE: dict[type[Logger], type[Logger]] = {}
"""Of each quiet class the one that it stands for."""


@cache
def _quiet_kind(kind: type[Logger]) -> type[Logger]:
    # It adds nothing but methods, so that an object's class can be exchanged.
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "experiment": property(lambda self: _Nothing())}
    quiet = type(kind.__name__, (kind,), members | dict.fromkeys(_KEEPING, _nothing))
    _BEFORE[quiet] = kind
    return quiet


_KEEPING = (
    *("log_metrics", "log_hyperparams", "log_graph"),
    *("log_image", "log_figure", "log_histogram", "log_text", "log_table"),
    *("rewind", "save", "finalize"),
)


def _nothing(self: Logger, *args: Any, **options: Any) -> None:
    pass


class _Nothing:
    """Stands for a library's object: whatever is asked of it gives itself, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass
