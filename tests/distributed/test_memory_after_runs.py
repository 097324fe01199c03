"""A run that has ended, well or badly, keeps neither its module alive nor the descriptors of its process groups."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
from small_runs import loader, refusal
from test_own_mistakes import Buggy, strategy_named

from drivetrain.testing import requires_linux
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


def _fit(strategy: str, where: str) -> weakref.ref[Any]:
    module = Buggy(where)
    settings: dict[str, Any] = {"strategy": strategy_named(strategy), "gradient_clip_val": 1.0}
    error = refusal(module, loader(24, 4), loader(8, 4), **settings)
    assert error.startswith("RuntimeError: mat1" if where == "second forward" else "nothing was raised")
    return weakref.ref(module)


def _leftovers(strategy: str, where: str) -> tuple[list[bool], list[int]]:
    alive, descriptors = [], []
    for _ in range(3):
        module = _fit(strategy, where)
        gc.collect()
        alive.append(module() is not None)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return alive, descriptors


@requires_linux()
@pytest.mark.parametrize("where", ["nowhere", "second forward"])
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "ZeRO 2", "ZeRO 3"])
def test_an_ended_run_is_freed(strategy: str, where: str) -> None:
    for alive, descriptors in on_ranks(_leftovers, 2, strategy, where, process_group=None):
        assert alive == [False] * 3
        assert descriptors[1] == descriptors[2]
