"""Silence loggers on ranks above 0, where loggers exist but their writing methods do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from drivetrain.loggers.logger import Logger


def silence_loggers(loggers: Iterable[Logger], silent: bool) -> None:
    """Make the writing methods of loggers do nothing, or restore them.

    A hook runs on every rank, but ``self.logger.log_image(...)`` in it must write only once. The loggers keep their
    names and folders, and remain instances of their classes.

    Args:
        loggers: the loggers of this process.
        silent: whether to silence the loggers, as on ranks above 0.
    """
    for logger in loggers:
        cls = type(logger)
        if silent != (cls in _ORIGINAL_CLASS):
            # Assigning the class fails for objects with `__slots__`, which are therefore not silenced.
            with suppress(TypeError):
                logger.__class__ = _silent_class(cls) if silent else _ORIGINAL_CLASS[cls]


_ORIGINAL_CLASS: dict[type[Logger], type[Logger]] = {}
"""The original class of each silent class."""


@cache
def _silent_class(cls: type[Logger]) -> type[Logger]:
    # The subclass adds only methods, so that it can be assigned to an object's `__class__`.
    members = {"__module__": cls.__module__, "__doc__": cls.__doc__, "experiment": property(lambda self: _NullObject())}
    silent = type(cls.__name__, (cls,), members | dict.fromkeys(_WRITING_METHODS, _do_nothing))
    _ORIGINAL_CLASS[silent] = cls
    return silent


_WRITING_METHODS = (
    *("log_metrics", "log_hyperparams", "log_graph"),
    *("log_image", "log_figure", "log_histogram", "log_text", "log_table"),
    *("rewind", "save", "finalize"),
)


def _do_nothing(self: Logger, *args: Any, **options: Any) -> None:
    pass


class _NullObject:
    """Replaces a library's object. All attributes, items and call results are the `_NullObject` itself."""

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
