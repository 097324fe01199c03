"""Loaders that overwrite the previous batch, on two ranks. Row I-09."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Regression, about, data, each, global_batches, train_by_hand, trained, weights
from torch.utils.data import DataLoader

from oracle.check import check
from oracle.program import Data, Program
from worlds import on_ranks


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("fewest_on_rank_0", [False, True])
def test_streams_that_reuse_memory_equal_the_plain_loop(accumulate: int, fewest_on_rank_0: bool) -> None:  # I-09
    data = Data("reused", samples=14, fewest_on_rank_0=fewest_on_rank_0)
    assert not check(Program("ddp", 2, data=data, accumulate=accumulate, epochs=2))


class Collating:
    """Collates into the same tensors every time."""

    def __init__(self) -> None:
        self.buffers = torch.empty(4, 4), torch.empty(4, 1)

    def __call__(self, samples: list[Any]) -> Any:
        pairs = zip(self.buffers, zip(*samples, strict=True), strict=True)
        return tuple(torch.stack(list(values), out=buffer[: len(values)]) for buffer, values in pairs)


class Weighed(Regression):
    def batch_weight(self, batch: Any) -> Any:
        return len(batch[0])


def _collated(kind: type[Regression], window: int) -> torch.Tensor:
    loader = DataLoader(data(37), batch_size=4, collate_fn=Collating())
    return trained(kind(), loader, strategy="ddp", accumulate_grad_batches=window)


def test_a_collate_function_that_reuses_memory_trains_as_batches_of_their_own() -> None:  # I-09
    cases = [(kind, window) for kind in (Regression, Weighed) for window in (1, 3)]
    for found in on_ranks(each, 2, _collated, *cases, process_group=None):
        for (kind, window), held in zip(cases, found, strict=True):
            wanted = weights(train_by_hand(Regression(), global_batches(37, 8), window))
            torch.testing.assert_close(held, wanted, atol=1e-6, rtol=1e-5, msg=about((kind.__name__, window)))
