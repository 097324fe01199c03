"""Loggers that log nothing: a run's loggers on ranks above 0, and the `NullLogger` of a trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Self

from drivetrain.loggers.logger import Logger


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
