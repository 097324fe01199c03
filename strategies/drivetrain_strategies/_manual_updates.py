"""Frozen weights that user code moves where the move is lost: a teacher that follows its student, say."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.errors import ConfigurationError, listed

GATHERED = (
    "the weights were gathered for a forward, and what was gathered is dropped: the shards are as they were.",
    "move them in on_train_batch_end, where the module holds the shards.",
)
PARTITIONED = (
    "the weights are partitioned, and what is written to is empty: the partitions are as they were.",
    "move them within deepspeed.zero.GatheredParameters(weights, modifier_rank=0), or use strategy='fsdp' or 'ddp'.",
)
ROUNDED = (
    "the module holds rounded copies, and the weights in float32, which are computed from and saved, are as they were.",
    "use precision='32-true' here, or strategy='fsdp' or 'ddp'; EMAWeightAveraging keeps an average of what trains.",
)


def moved_by_hand(names: Sequence[str], strategy: str, lost: tuple[str, str]) -> ConfigurationError:
    """The refusal of frozen weights that were moved by hand in vain.

    Args:
        names: of the weights.
        strategy: under which.
        lost: why the move is lost, and what to do.
    """
    why, fix = lost
    return ConfigurationError(f"Frozen weights were moved by hand, under {strategy}: {listed(list(names))}.", why, fix)
