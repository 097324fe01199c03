"""A digest of a module's weights, the same under every strategy and on any number of ranks."""

from __future__ import annotations

import hashlib

from drivetrain._distributed.checksum import checksum_share, stack_on_cpu
from drivetrain.strategies.strategy import Strategy


def weights_digest(strategy: Strategy) -> str:
    """Return a digest of the exact values of all parameters and persistent buffers.

    A collective operation. Each rank computes position-dependent checksums of its shards. Only one number per tensor is
    gathered.

    Args:
        strategy: the strategy that has set up the module.
    """
    headers, sums = [], []
    for name, value in sorted(strategy.model_state().items()):
        shard = strategy.shard_of(value)
        headers.append(f"{name} {tuple(shard.shape)} {shard.dtype}")
        sums.append(checksum_share(shard, strategy.rank))
    total = strategy.control.all_gather(stack_on_cpu(sums)).sum(0).tolist()
    return hashlib.blake2b(repr((headers, total)).encode(), digest_size=16).hexdigest()
