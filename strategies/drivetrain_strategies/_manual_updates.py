"""Errors for updates of weights by user code (an EMA teacher, for example) that would be lost."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.errors import ConfigurationError, listed

GATHERED_UPDATE_REASON_AND_FIX = (
    "the update changed gathered copies, which are dropped after the step, but not the shards.",
    "update the weights in on_train_batch_end, where the module holds the shards.",
)
PARTITIONED = (
    "the weights are partitioned, so the update changed empty tensors, but not the partitions.",
    "update the weights within deepspeed.zero.GatheredParameters(weights, modifier_rank=0), or use 'fsdp' or 'ddp'.",
)
ROUNDED = (
    "the update changed half-precision copies, but not the float32 weights, which checkpoints save.",
    "use precision='32-true', or strategy='fsdp' or 'ddp'. To average trainable weights, use EMAWeightAveraging.",
)


def manual_update_error(names: Sequence[str], strategy: str, lost: tuple[str, str]) -> ConfigurationError:
    """Return the error for an update of weights by user code that would be lost.

    Args:
        names: names of the weights.
        strategy: name of the strategy.
        lost: why the update is lost, and the fix.
    """
    why, fix = lost
    return ConfigurationError(f"User code updated weights under {strategy}: {listed(list(names))}.", why, fix)
