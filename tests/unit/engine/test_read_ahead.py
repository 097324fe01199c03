"""Micro-batches that are read one ahead, on their way to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain._engine import batches
from drivetrain._loops.windows import single_windows
from drivetrain.data._sharding import BatchShard


class _Immediate:
    """Stands where CUDA's streams would: a batch arrives as soon as it is sent."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is kept."""

    def send(self, batch: Any) -> Any:
        return batch

    def receive(self, sent: Any) -> Any:
        return sent


def test_each_keeps_its_own_samples_while_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`single_windows` fills one object anew: what is read ahead must not change what is trained on."""
    monkeypatch.setattr(batches, "Prefetcher", _Immediate)
    pairs = ((number, BatchShard(number + 1, number + 1, False, 0)) for number in range(4))
    move = batches.BatchMover((), None, (lambda batch, _: 10 * batch,), torch.device("cuda"))
    found = batches.moved(single_windows(pairs), move)
    assert [(micro.batch, micro.samples, micro.weight) for micro in found] == [
        (0, 1, 1),
        (10, 2, 2),
        (20, 3, 3),
        (30, 4, 4),
    ]
