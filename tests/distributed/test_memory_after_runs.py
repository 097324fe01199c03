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

STRATEGIES = ("auto", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


class Failing(Regression):
    """Fails in its third step, or in validation."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training" and batch_idx == 2:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation":
            raise ValueError("on purpose")


def _fit(strategy: str, where: str) -> weakref.ref[Any]:
    module = Failing(where)
    run = quiet(strategy=strategy, gradient_clip_val=1.0, num_sanity_val_steps=0)
    if where == "nowhere":
        run.fit(module, loader(32, 4), loader(8, 4))
    else:
        with failing():
            run.fit(module, loader(32, 4), loader(8, 4))
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
@pytest.mark.parametrize("where", ["nowhere", "training", "validation"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_ended_run_is_freed(strategy: str, where: str) -> None:
    for alive, descriptors in on_ranks(_leftovers, 2, strategy, where, process_group=None):
        assert alive == [False] * 3
        assert descriptors[1] == descriptors[2]
