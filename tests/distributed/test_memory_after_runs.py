"""A run that has ended, well or badly, keeps neither its module alive nor the descriptors of its process groups."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
from small_runs import Regression, failing, loader, quiet

from drivetrain.testing import requires_linux
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


class Failing(Regression):
    """Fails in its third step, if that is in training."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training" and batch_idx == 2:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def _fit(strategy: str, where: str) -> weakref.ref[Any]:
    module = Failing(where)
    with failing() as error:
        quiet(strategy=strategy, gradient_clip_val=1.0).fit(module, loader(24, 4), loader(8, 4))
    assert error["text"] == ("" if where == "nowhere" else "on purpose")
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
@pytest.mark.parametrize("where", ["nowhere", "training"])
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_an_ended_run_is_freed(strategy: str, where: str) -> None:
    for alive, descriptors in on_ranks(_leftovers, 2, strategy, where, process_group=None):
        assert alive == [False] * 3
        assert descriptors[1] == descriptors[2]
