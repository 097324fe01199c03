"""Validation leaves training alone on several ranks as well. Row I-13."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, loader, quiet, seeded, weights
from torch import nn

from worlds import on_ranks


class Dropping(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + random.random())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        random.random()
        torch.rand(1 + self.global_rank)

    def on_validation_epoch_end(self) -> None:
        torch.rand(3)


def _trained(strategy: str) -> list[Any]:
    found = []
    for validation, options in (
        (None, {}),
        (loader(10, 2, shuffle=True), {}),
        (loader(10, 2), {"val_check_interval": 0.25, "num_sanity_val_steps": 2}),
    ):
        module = Dropping()
        run = quiet(strategy=strategy, seed=1, max_epochs=2, **options)
        run.fit(module, loader(33, 4, shuffle=True), validation)
        found.append(weights(module))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_are_the_same_with_it_without_it_and_more_often(strategy: str) -> None:
    # I-13
    for without, once, often in on_ranks(_trained, 2, strategy):
        assert torch.equal(without, once)
        assert torch.equal(without, often)
