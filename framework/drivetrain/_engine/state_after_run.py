"""Checks after a run, or after a failure, whether this process has the whole state that a resumed run needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import CheckpointParts, RunCore

logger = logging.getLogger("drivetrain")


def check_state_is_whole(core: RunCore, collect_parts: Callable[[], CheckpointParts]) -> None:
    """Check that this process has the state of all ranks and optimizers, which a resumed run needs.

    Raises:
        ConfigurationError: the run has ended, and has left this process without a part of the state.
    """
    strategy = core.strategy
    if strategy.module is not None and not core.ran_elsewhere:
        return
    why = None
    if core.ran_elsewhere:
        why = "the optimizers' states were lost when the run's processes exited."
    elif strategy.world_size > 1:
        why = "a resumed run needs the state of every rank, and the ranks no longer communicate."
    else:
        held = {id(parameter) for parameter in core.module.parameters()}
        groups = [group for optimizer in collect_parts().optimization.optimizers for group in optimizer.param_groups]
        if any(id(parameter) not in held for group in groups for parameter in group["params"]):
            why = "the optimizers' states belong to the parameters that the strategy has sharded."
    if why is not None:
        raise ConfigurationError(
            f"save_checkpoint after a run under {type(strategy).__name__}.",
            f"{why} This process has the trained weights.",
            "call save_checkpoint within the run, for example in on_train_end, or with weights_only=True.",
        )


def is_within_step(core: RunCore, parts: CheckpointParts) -> bool:
    """Return whether a run that failed did so within a micro-batch, a window, or the step of a scheduler."""
    position, progress = core.position, core.progress
    in_micro_batch = position.loop == "training" and position.batch_idx == progress.batch_idx
    return in_micro_batch or progress.within_window or (parts.loop is not None and parts.loop.steps_scheduler)


def go_back_to_whole_step(core: RunCore, parts: CheckpointParts) -> bool:
    """Make checkpoints store the state after the last whole step; return False with a warning if it is lost."""
    snapshot, is_half_step = parts.stopping.snapshot, is_within_step(core, parts)
    # The snapshot of the last window is outdated once the epoch's end, such as its validation, has begun.
    if snapshot is not None and (is_half_step or core.position.loop == "training"):
        snapshot.go_back()
    if is_half_step and (snapshot is None or not snapshot.is_whole):
        kept = snapshot is not None and snapshot.every_step
        why = "is lost, since weights had changed" if kept else "was not kept by Checkpoint(save_on_exception=True)"
        logger.warning("Nothing is saved after the failure: the state before the step that failed %s.", why)
        return False
    core.progress.reset_to_window_start()
    return True


def refuse_half_step(core: RunCore, parts: CheckpointParts) -> None:
    """Check that a run that has failed and ended did not fail within a step.

    Raises:
        ConfigurationError: it did, so that buffers and perhaps weights are those of half a step.
    """
    if is_within_step(core, parts):
        raise ConfigurationError(
            "save_checkpoint after a run that failed within a step.",
            "the buffers, and perhaps the weights, are those of half a step.",
            "Checkpoint(save_on_exception=True) saves the state before the step that failed.",
        )
