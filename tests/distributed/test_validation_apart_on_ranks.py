"""Validation does not influence training, on several ranks. Row I-13.

Random numbers, running means that each rank has of its own samples, and a sanity check: test_programs_on_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, loader, trained, weights

from drivetrain import Callback
from drivetrain_strategies import DDPStrategy
from worlds import on_ranks


class Centring(Regression):
    """Subtracts a running mean from its inputs, which each rank computes over its own data."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("seen", torch.tensor(float("nan")))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.mean.copy_(0.5 * self.mean + 0.5 * x.mean(0))
        return self.loss((x - self.mean, y))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def on_train_end(self) -> None:
        self.at_the_end = [buffer.detach().clone() for buffer in self.buffers()]


class Swapping(Callback):
    """Validates with another mean, as averaging callbacks do, or sets it for good."""

    def __init__(self, for_good: bool = False) -> None:
        self.for_good = for_good

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.before = module.mean.clone()
        module.mean.fill_(3.0)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not self.for_good:
            module.mean.copy_(self.before)


class SavesInValidation(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def train(module: Centring, strategy: Any, validation: Any, *callbacks: Callback, **options: Any) -> Any:
    """Return the weights and this rank's buffers of the end of training, before rank 0's replace them."""
    trained(module, loader(28, 2), validation, strategy=strategy, callbacks=[*callbacks], **options)
    return [weights(module), *module.at_the_end]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(one, other, strict=True))


def buffers_apart() -> DDPStrategy:
    return DDPStrategy(broadcast_buffers=False)


STRATEGIES = {"ddp": DDPStrategy, "ddp, buffers apart": buffers_apart, "fsdp": lambda: "fsdp"}


def _without_and_with_validation(strategy: str) -> list[Any]:
    build, options = STRATEGIES[strategy], {"accumulate_grad_batches": 3}
    without = train(Centring(), build(), None, **options)
    # Of five samples one rank has two and joins once.
    return [without, train(Centring(), build(), loader(5, 1), Swapping(), val_check_interval=2, **options)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_per_rank_buffers_do_not_depend_on_validation(strategy: str) -> None:  # I-13
    for without, with_validation in on_ranks(_without_and_with_validation, 2, strategy):
        assert equal(with_validation, without)


def _changed_by_validation(path: str) -> tuple[torch.Tensor, bool]:
    validation, options = loader(4, 1), {"val_check_interval": 3}
    changed = train(Centring(), buffers_apart(), validation, Swapping(for_good=True), val_check_interval=7)
    whole = train(Centring(), buffers_apart(), validation, SavesInValidation(path), **options)
    resumed = train(Centring(), buffers_apart(), validation, ckpt_path=path, **options)
    return changed[1], equal(whole, resumed)


def test_changes_made_in_validation_persist_and_are_saved(tmp_path: Path) -> None:  # I-13, F-02
    for mean, resumes_exactly in on_ranks(_changed_by_validation, 2, str(tmp_path / "saved")):
        assert torch.equal(mean, torch.full((FEATURES,), 3.0))
        assert resumes_exactly
