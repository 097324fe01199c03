"""Micro-batches that are moved to a device one ahead of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# Private: on a CPU nothing is read ahead.
from drivetrain._engine import batches
from drivetrain._loops.windows import single_windows
from drivetrain.data._sharding import BatchShard


class _Immediate:
    """Replaces the CUDA prefetcher: a batch arrives as soon as it is sent."""

    def __init__(self, device: torch.device) -> None:
        """Return the batch unchanged."""

    def send(self, batch: Any) -> Any:
        return batch

    def receive(self, sent: Any) -> Any:
        return sent


def test_a_micro_batch_keeps_its_samples_while_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`single_windows` reuses one object: reading ahead must not change the current micro-batch."""
    monkeypatch.setattr(batches, "Prefetcher", _Immediate)
    pairs = ((number, BatchShard(number + 1, number + 1, False, 0)) for number in range(4))
    move = batches.BatchMover((), None, (lambda batch, _: 10 * batch,), torch.device("cuda"))
    found = batches.move_micro_batches(single_windows(pairs), move)
    assert [(micro.batch, micro.samples, micro.weight) for micro in found] == [
        (0, 1, 1),
        (10, 2, 2),
        (20, 3, 3),
        (30, 4, 4),
    ]
