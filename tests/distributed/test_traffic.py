"""A step sends to other ranks what hand-written code sends, and not a collective more: H-01, No tax."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.by_engine import train_by_engine
from benchmarks.by_hand import WRAPS, train_by_hand
from benchmarks.traffic import Traffic, a_step
from drivetrain.testing import run_distributed


def _sent(strategy: str) -> Any:
    import torch
    import torch.distributed as dist

    with Traffic() as known:
        dist.all_reduce(torch.zeros(4))
    assert known.collectives == {"all-reduce": 1}
    assert known.sent == 16  # two ranks send half of 16 bytes to each other, twice
    by_hand = a_step(lambda steps: train_by_hand(strategy, steps))
    by_engine = a_step(lambda steps: train_by_engine(strategy, steps))
    return by_hand, by_engine, train_by_hand(strategy, 3), train_by_engine(strategy, 3)


@pytest.mark.parametrize("strategy", list(WRAPS))
def test_a_step_sends_what_hand_written_code_sends(strategy: str) -> None:
    for by_hand, by_engine, weights, same_weights in run_distributed(_sent, 2, strategy):
        assert by_engine == by_hand
        assert by_engine[1] > 0
        assert weights == same_weights
