"""What callbacks that monitor a value share: when they act, and whether the value belongs to the present weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


def fresh_value(trainer: RunContext, name: str) -> float | None:
    """Return the logged value ``name`` if it belongs to the present weights: a step's value, or one of this step.

    None if it was not logged, or if weights have changed since it was reduced. A collective operation.
    """
    value = trainer.metrics.agreed(name)
    reduced_at = None if value is None else trainer.metrics.reduced_at(name)
    return value if reduced_at in (None, trainer.global_step) else None


def acts_at_epoch_end(trainer: RunContext, choice: bool | None) -> bool:
    """Return whether a callback acts at the end of an epoch, not of a validation: the user's choice, if there is one.

    Otherwise the end of the epoch is chosen if validation runs once per epoch, or not at all.
    """
    if choice is not None:
        return choice
    once_per_epoch = trainer.val_check_interval in (None, 1.0) and trainer.check_val_every_n_epoch == 1
    return once_per_epoch or not trainer.num_val_batches


def was_logged(trainer: RunContext, names: Sequence[str]) -> bool:
    """Return whether all these values were logged at some time. A collective operation."""
    return all(trainer.metrics.agreed(name) is not None for name in names)


def missing_value(
    trainer: RunContext, monitored_by: str, name: str, when: str = "before a checkpoint is saved"
) -> ConfigurationError:
    """Return the error for a logged value that ``monitored_by`` needs and that no rank has logged."""
    known = sorted(trainer.callback_metrics)
    return ConfigurationError(
        f"{monitored_by}: no value of that name was logged.{nearest(name, known)}",
        f"logged so far: {', '.join(known)}" if known else "nothing was logged so far",
        f"call self.log({name!r}, ...) {when}, or name another value",
    )
