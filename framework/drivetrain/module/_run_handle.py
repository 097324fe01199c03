"""The one handle by which a `TrainModule` or a `DataModule` reaches the run it is in, or was in last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_HANDLES = ("_trainer", "_last_trainer", "_held")


class RunHandle:
    """Mixed into what a run takes hold of. A copy, deep or pickled, is in no run."""

    _trainer: RunContext | None = None
    """Of the run that is under way."""

    _last_trainer: RunContext | None = None
    """Of the last one, or what a user has set."""

    @property
    def trainer(self) -> RunContext:
        """The `Fit` that is running, or that ran last, as `RunContext` describes it. It may be set before a run.

        Raises:
            ConfigurationError: there is none.
        """
        trainer = self._trainer or self._last_trainer
        if trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run, so it has no trainer.",
                "there is one from when fit, validate, test or predict runs.",
                "read it in a step or a hook, or after the run; before it, set module.trainer = trainer.",
            )
        return trainer

    @trainer.setter
    def trainer(self, trainer: RunContext | None) -> None:
        if self._trainer is not None and trainer is not self._trainer:
            raise ConfigurationError(
                f"{type(self).__name__}.trainer was set during a run.",
                "the run goes on with its own, and the two would disagree.",
                "set it before the run or after it.",
            )
        self.__dict__["_last_trainer"] = trainer

    def _in_a_run(self, what: str) -> RunContext:
        """`trainer` while it runs.

        Raises:
            ConfigurationError: ``what`` needs that, and there is no run.
        """
        if self._trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run, which {what} needs.",
                "values are kept, and other ranks are there, only while fit, validate, test or predict runs.",
                "call it from a step or a hook; to try a step by hand, run it with Fit(fast_dev_run=True).",
            )
        return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _HANDLES}


def attach(owner: RunHandle, trainer: RunContext) -> None:
    """Let ``owner`` reach ``trainer``, which runs until `detach`."""
    owner.__dict__["_trainer"] = trainer


def detach(owner: RunHandle) -> None:
    """The run is over: ``owner`` keeps its trainer for reading. Nothing happens where there is none."""
    trainer = owner.__dict__.pop("_trainer", None)
    if trainer is not None:
        owner.__dict__["_last_trainer"] = trainer


def is_attached(owner: RunHandle) -> bool:
    """Whether ``owner`` is in a run."""
    return "_trainer" in owner.__dict__
