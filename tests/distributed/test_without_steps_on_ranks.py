"""Ranks that make no step stop after the same window, whichever rank requests it. Row I-05."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from small_runs import Regression, loader, quiet

from drivetrain import Callback
from worlds import on_ranks

BATCHES = 300


class Overflowing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * float("nan")


class Weightless(Regression):
    def batch_weight(self, batch: Any) -> float:
        return 0.0


class OnRank(Callback):
    """Requests a stop on one rank only, after its tenth micro-batch."""

    def __init__(self, rank: int, signals: bool) -> None:
        self.rank, self.signals = rank, signals

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 9 and dist.get_rank() == self.rank:
            if self.signals:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                trainer.should_stop = True


def _ended(strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module, options in (
        ("should_stop", Overflowing(), {"precision": "16-mixed", "callbacks": OnRank(1, signals=False)}),
        ("signal", Weightless(), {"callbacks": OnRank(1, signals=True)}),
        ("max_time", Weightless(), {"max_time": timedelta(milliseconds=100), "max_epochs": 200}),
    ):
        run = quiet(strategy=strategy, **options)
        try:
            run.fit(module, loader(BATCHES * 2, 1))
        except SystemExit as left:
            found["code"] = left.code
        found[name] = (run.micro_batches, run.global_step, run.current_epoch)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_end_after_the_same_window(strategy: str) -> None:
    # I-05
    first, second = on_ranks(_ended, 2, strategy)
    assert first == second
    assert first["code"] == 128 + signal.SIGTERM
    for name in ("should_stop", "signal"):
        micro_batches, steps, _ = first[name]
        assert 10 <= micro_batches < BATCHES, (name, first)
        assert steps == 0
    _, steps, epochs = first["max_time"]
    assert steps == 0
    assert epochs < 200
