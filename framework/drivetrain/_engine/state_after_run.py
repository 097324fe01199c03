"""Checks after a run, or after a failure, whether this process has the whole state that a resumed run needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import CheckpointParts, RunCore
    from drivetrain._engine.window_snapshot import WindowSnapshot

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


def has_state_before_step(snapshot: WindowSnapshot | None) -> bool:
    """Return whether the state before the step that failed was kept, and log a warning if it was not."""
    if snapshot is not None and snapshot.is_whole:
        return True
    is_kept = snapshot is not None and snapshot.is_active
    why = "is lost, since weights had changed" if is_kept else "was not kept by Checkpoint(save_on_exception=True)"
    logger.warning("Nothing is saved after the failure: the state before the step that failed %s.", why)
    return False
