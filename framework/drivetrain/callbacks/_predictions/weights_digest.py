"""A digest of a module's weights, the same under every strategy and on any number of ranks."""

from __future__ import annotations

import hashlib

from drivetrain._distributed.checksum import checksum_share, stack_on_cpu
from drivetrain.strategies.strategy import Strategy


def weights_digest(strategy: Strategy) -> str:
    """Return a digest of all parameters and persistent buffers, to the bit. Collective.

    Each rank adds up what it holds, at its place in the whole; nothing is gathered but a number for each tensor.

    Args:
        strategy: holds the module.
    """
    said, sums = [], []
    for name, value in sorted(strategy.model_state().items()):
        held = strategy.shard_of(value)
        said.append(f"{name} {tuple(held.shape)} {held.dtype}")
        sums.append(checksum_share(held, strategy.rank))
    total = strategy.control.all_gather(stack_on_cpu(sums)).sum(0).tolist()
    return hashlib.blake2b(repr((said, total)).encode(), digest_size=16).hexdigest()
