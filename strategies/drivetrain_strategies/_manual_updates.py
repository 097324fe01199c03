"""Errors for updates of frozen weights by user code (an EMA teacher, for example) that would be lost."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.errors import ConfigurationError, listed

GATHERED = (
    "the update went to gathered copies, which are dropped after the forward; the shards are unchanged.",
    "update them in on_train_batch_end, where the module holds the shards.",
)
PARTITIONED = (
    "the weights are partitioned, so the update went to empty tensors; the partitions are unchanged.",
    "update them within deepspeed.zero.GatheredParameters(weights, modifier_rank=0), or use strategy='fsdp' or 'ddp'.",
)
ROUNDED = (
    "the update went to half-precision copies; the float32 weights, which checkpoints save, are unchanged.",
    "use precision='32-true', or strategy='fsdp' or 'ddp'; EMAWeightAveraging averages trainable weights.",
)


def manual_update_error(names: Sequence[str], strategy: str, lost: tuple[str, str]) -> ConfigurationError:
    """Return the error for frozen weights that were updated by user code although the update is lost.

    Args:
        names: names of the weights.
        strategy: name of the strategy.
        lost: why the update is lost, and the fix.
    """
    why, fix = lost
    return ConfigurationError(f"User code updated frozen weights under {strategy}: {listed(list(names))}.", why, fix)
