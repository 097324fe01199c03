"""Validation does not influence training, on several ranks. Row I-13."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, loader, quiet, seeded, weights
from torch import nn

from drivetrain import Callback
from drivetrain.strategies.strategy import Strategy
from drivetrain_strategies.ddp.strategy import DDPStrategy
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
def test_weights_do_not_depend_on_validation(strategy: str) -> None:
    # I-13
    for without, once, often in on_ranks(_trained, 2, strategy):
        assert torch.equal(without, once)
        assert torch.equal(without, often)


class Centring(Regression):
    """Subtracts a running mean from its inputs, which each rank computes over its own data."""

    mean: torch.Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("seen", torch.tensor(float("nan")))

    def on_fit_start(self) -> None:
        if self.global_step == 0:
            self.mean += self.global_rank  # different on each rank before a sanity check

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mean = 0.5 * self.mean + 0.5 * x.mean(0)
        if self.replaces:
            self.mean = mean
        else:
            self.mean.copy_(mean)
        return self.loss((x - self.mean, y))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class Grown(Centring):
    """Has a buffer whose length differs between ranks, and one that only the last rank has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.kept = nn.Buffer(torch.ones(1 + self.global_rank))
            if self.global_rank:
                self.late = nn.Buffer(torch.ones(()))
        return super().training_step(batch, batch_idx) * self.kept.sum() * getattr(self, "late", 1)


class Swapping(Callback):
    """Validates with other buffers, as averaging callbacks do, or resets one permanently."""

    def __init__(self, for_good: bool = False) -> None:
        self.for_good = for_good

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.before = module.mean.clone()
        module.mean.fill_(3.0)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not self.for_good:
            module.mean.copy_(self.before)


def _centred(module: Regression, strategy: Any, validation: Any, **options: Any) -> list[torch.Tensor]:
    """Train; return this rank's buffers at the end of the epoch, before rank 0's replace them."""
    ends: list[torch.Tensor] = []

    class Ends(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            ends.extend(buffer.detach().clone() for buffer in module.buffers())

    options = {"accumulate_grad_batches": 3, **options}
    given = options.pop("callbacks", [])
    ckpt_path = options.pop("ckpt_path", None)
    run = quiet(strategy=strategy, callbacks=[Ends(), *given], **options)
    run.fit(module, loader(28, 2), validation, ckpt_path=ckpt_path)
    return [weights(module), *ends]


def _kinds() -> list[tuple[str, Callable[[], Strategy | str]]]:
    return [
        ("ddp", DDPStrategy),
        ("ddp, buffers apart", lambda: DDPStrategy(broadcast_buffers=False)),
        ("fsdp", lambda: "fsdp"),
    ]


def _alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(one, other, strict=True))


def _with_and_without() -> dict[str, bool]:
    """Return by case whether validation left training unchanged on this rank."""
    often: dict[str, Any] = {"val_check_interval": 2}
    found = {}
    for name, strategy in _kinds():
        cases: list[tuple[str, Callable[[], Any], dict[str, Any]]] = [
            ("written to", lambda: Centring(False), {}),
            ("replaced", lambda: Centring(True), {}),
            ("a sanity check", lambda: Centring(False), {"num_sanity_val_steps": 1}),
            ("swapped meanwhile", lambda: Centring(False), {"callbacks": [Swapping()]}),
        ]
        if name == "ddp, buffers apart":
            cases.append(("other forms", lambda: Grown(False), {}))
        for case, build, options in cases:
            without = _centred(build(), strategy(), None)
            # Of five samples one rank has two and joins once.
            found[f"{name}, {case}"] = _alike(_centred(build(), strategy(), loader(5, 1), **often, **options), without)
    return found


def test_per_rank_buffers_do_not_depend_on_validation() -> None:
    # I-13
    for found in on_ranks(_with_and_without, 2):
        assert len(found) == 13
        assert all(found.values()), found


def _changed_by_validation(folder: str) -> tuple[list[torch.Tensor], bool]:
    options = {"strategy": DDPStrategy(broadcast_buffers=False), "val_check_interval": 7, "accumulate_grad_batches": 1}
    changed = _centred(Centring(False), validation=loader(4, 1), callbacks=[Swapping(for_good=True)], **options)

    class Saving(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(f"{folder}/saved")

    options["val_check_interval"] = 3
    whole = _centred(Centring(False), validation=loader(4, 1), callbacks=[Saving()], **options)
    resumed = _centred(Centring(False), validation=loader(4, 1), ckpt_path=f"{folder}/saved", **options)
    return changed, _alike(whole, resumed)


def test_changes_made_in_validation_persist_and_are_saved(tmp_path: Path) -> None:
    # I-13, F-02
    for (_, mean, _), goes_on in on_ranks(_changed_by_validation, 2, str(tmp_path)):
        assert torch.equal(mean, torch.full((FEATURES,), 3.0))
        assert goes_on
