"""The one handle by which a `TrainModule` or a `DataModule` reaches the run it is in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


class RunHandle:
    """Mixed into what a run takes hold of. Outside a run its instances carry nothing of it."""

    _trainer: RunContext | None = None

    @property
    def trainer(self) -> RunContext:
        """The `Fit` that is running, as `RunContext` describes it.

        Raises:
            ConfigurationError: there is none just now.
        """
        if self._trainer is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run, so it has no trainer.",
                "trainer, log and what talks to other ranks exist only while fit, validate, test or predict runs.",
                "call it from a step or a hook, or read the result from the Fit object after the run.",
            )
        return self._trainer


def attach(owner: RunHandle, trainer: RunContext) -> None:
    """Let ``owner`` reach ``trainer``, until `detach`."""
    owner.__dict__["_trainer"] = trainer


def detach(owner: RunHandle) -> None:
    """Take the handle away again; nothing happens where there is none."""
    owner.__dict__.pop("_trainer", None)


def is_attached(owner: RunHandle) -> bool:
    """Whether ``owner`` is in a run."""
    return "_trainer" in owner.__dict__
