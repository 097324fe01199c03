"""Silence loggers on ranks above 0: the loggers exist there, but their writing methods do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from drivetrain.loggers.logger import Logger
from drivetrain.loggers.null_logger import NullObject


def silence_loggers(loggers: Iterable[Logger], silent: bool) -> None:
    """Make the writing methods of loggers do nothing, or restore them.

    A hook runs on every rank, but a call of ``self.logger.log_image(...)`` in a hook must write only once. Silenced
    loggers keep their names and folders, and remain instances of their classes.

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
"""The class of the logger, by the subclass with silent methods."""


@cache
def _silent_class(cls: type[Logger]) -> type[Logger]:
    # The subclass adds only methods, so that it can be assigned to an object's `__class__`.
    members = {"__module__": cls.__module__, "__doc__": cls.__doc__, "experiment": property(lambda self: NullObject())}
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
