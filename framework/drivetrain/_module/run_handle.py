"""RunHandle: gives a `TrainModule` or a `DataModule` access to its current or last run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_UNCOPIED_ATTRIBUTES = ("_trainer", "_last_trainer", "_is_locked")


class RunHandle:
    """Mixin with the ``trainer`` property. Deep copies and pickled copies are not attached to a run."""

    _trainer: RunContext | None = None
    """The trainer of the current run."""

    _last_trainer: RunContext | None = None
    """The trainer of the last run, or the trainer that the user set."""

    @property
    def _any_run(self) -> RunContext | None:
        return self._trainer or self._last_trainer

    @property
    def trainer(self) -> RunContext:
        """The `Fit` that is running or ran last, as a `RunContext`. A trainer may also be set before a run.

        Raises:
            ConfigurationError: there is no current or last run.
        """
        return self._any_run or self._require_run("trainer")

    @trainer.setter
    def trainer(self, trainer: RunContext | None) -> None:
        if self._trainer is not None and trainer is not self._trainer:
            raise ConfigurationError(
                f"{type(self).__name__}.trainer was set during a run.",
                "the run uses another trainer, and the two would contradict each other.",
                "set trainer before or after the run.",
            )
        self.__dict__["_last_trainer"] = trainer

    def _require_run(self, operation: str) -> RunContext:
        """Return the trainer of the current run.

        Args:
            operation: the operation that needs a run, for the error message.

        Raises:
            ConfigurationError: there is no current run.
        """
        if self._trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run, which {operation} needs.",
                "metrics and collectives are available only while fit, validate, test or predict runs.",
                "use it in a step or a hook. To try out a step, use Fit(fast_dev_run=True) or set module.trainer.",
            )
        return self._trainer

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _UNCOPIED_ATTRIBUTES}


def attach(owner: RunHandle, trainer: RunContext) -> None:
    """Set ``owner``'s current trainer until `detach`."""
    owner.__dict__["_trainer"] = trainer


def detach(owner: RunHandle) -> None:
    """Turn ``owner``'s current trainer, if there is one, into its last trainer."""
    trainer = owner.__dict__.pop("_trainer", None)
    if trainer is not None:
        owner.__dict__["_last_trainer"] = trainer


def is_attached(owner: RunHandle) -> bool:
    """Return whether ``owner`` is in a run."""
    return "_trainer" in owner.__dict__
