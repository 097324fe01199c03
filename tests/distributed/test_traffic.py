"""What a step sends to other ranks: what hand-written code does, and what docs/strategies.md says. H-01."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from benchmarks.by_engine import train_by_engine
from benchmarks.by_hand import WRAPS, train_by_hand
from benchmarks.calls import python_calls_a_step
from benchmarks.nets import GPT
from benchmarks.traffic import Traffic, a_step
from worlds import on_ranks

narrow = partial(GPT, width=16, heads=2)
"""Has all layers of the GPT that is timed: as many calls and collectives, in a tenth of the time."""

NET = narrow()
P = G = sum(parameter.nbytes for parameter in NET.parameters())
B = P - sum(parameter.nbytes for parameter in NET.blocks.parameters())
CALLS_OVER = {"ddp": 15, "fsdp": 110, "fsdp_grad_op": 90}  # 583, 10,731 and 9,903 by hand
FORMULAS = {"ddp": 2 * G / 2, "fsdp": (2 * P - B + G) / 2, "fsdp_grad_op": (P + G) / 2}


def _sent(strategy: str) -> Any:
    import torch
    import torch.distributed as dist

    with Traffic() as known:
        dist.all_reduce(torch.zeros(4))
    assert known.collectives == {"all-reduce": 1}
    assert known.sent == 16  # two ranks send half of 16 bytes to each other, twice
    loops = partial(train_by_hand, strategy, make=narrow), partial(train_by_engine, strategy, net=narrow)
    return [(a_step(loop), loop(3), python_calls_a_step(loop, 1, 3, runs=3)) for loop in loops]


@pytest.mark.parametrize("strategy", list(WRAPS))
def test_a_step_sends_what_hand_written_code_sends(strategy: str) -> None:
    for by_hand, by_engine in on_ranks(_sent, 2, strategy):
        assert by_engine[:2] == by_hand[:2]  # collectives, bytes, and the weights that come of it
        (_, nbytes), _, calls = by_engine
        assert calls - by_hand[2] <= CALLS_OVER[strategy]
        assert nbytes == FORMULAS[strategy]
