"""A teacher within the module that user code updates (EMA): updated exactly, or refused by name. Row L-01."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_runs import FEATURES, STRATEGIES, assert_near, data, loader, quiet, seeded
from torch import Tensor, nn

from drivetrain import TrainModule
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 32, 8
KEPT_WHOLE = "fsdp, kept whole"


class Student(TrainModule):
    """Distils a teacher that is updated in a "step", in a "hook", or "gathered" there, as ZeRO requires."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.student = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2)))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.where = where

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        found = self.student(x).float()
        return (found - target.float()).square().mean() + found.square().mean()

    @torch.no_grad()
    def update_teacher(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            teacher.lerp_(student.detach(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        if self.where == "step":
            self.update_teacher()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "hook":
            self.update_teacher()
        elif self.where == "gathered":
            import deepspeed

            weights = [*self.teacher.parameters(), *self.student.parameters()]
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
                self.update_teacher()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def by_hand(where: str) -> dict[str, Tensor]:
    """Written by hand: programs of the oracle have no teacher."""
    model = Student(where)
    optimizer = model.configure_optimizers()
    for x in data(SAMPLES).tensors[0].split(BATCH):
        optimizer.zero_grad()
        loss = model.loss(x)
        if where == "step":
            model.update_teacher()
        loss.backward()
        optimizer.step()
        if where != "step":
            model.update_teacher()
    return model.state_dict()


def _run(strategy: str, world: int, where: str, precision: str = "32-true") -> dict[str, Tensor] | str:
    module = Student(where)
    chosen = FSDPStrategy(reshard_after_forward=False) if strategy == KEPT_WHOLE else STRATEGIES[strategy]()
    try:
        fit = quiet(strategy=chosen, devices=world, precision=precision)
        fit.fit(module, loader(SAMPLES, BATCH // world), loader(SAMPLES, BATCH))
    except ConfigurationError as error:
        return str(error)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "world", "where"),
    [
        ("single", 1, "step"),
        ("single", 1, "hook"),
        ("ddp", 2, "step"),
        ("fsdp", 2, "hook"),
        (KEPT_WHOLE, 2, "hook"),
        ("zero 1", 2, "step"),
        ("zero 2", 2, "hook"),
        ("zero 3", 2, "gathered"),
    ],
)
def test_a_teacher_updated_by_hand_is_exact(strategy: str, world: int, where: str) -> None:  # L-01
    wanted = by_hand(where)
    for found in on_ranks(_run, world, strategy, world, where, process_group=None):
        assert not isinstance(found, str), found
        assert_near(found, wanted)


LOST = "User code updated weights"


@pytest.mark.parametrize(
    ("strategy", "where", "precision", "told"),
    [
        (KEPT_WHOLE, "step", "32-true", [LOST, "'teacher.0.weight'", "update the weights in on_train_batch_end"]),
        (KEPT_WHOLE, "step", "bf16-mixed", [LOST, "'teacher.0.weight'", "update the weights in on_train_batch_end"]),
        ("zero 1", "hook", "bf16-mixed", [LOST, "'teacher.0.weight'", "the update changed half-precision copies"]),
        ("zero 2", "step", "bf16-mixed", [LOST, "'teacher.0.weight'", "the update changed half-precision copies"]),
        ("zero 3", "gathered", "bf16-mixed", [LOST, "'teacher.0.weight'", "the update changed half-precision copies"]),
        ("zero 3", "hook", "32-true", ["'student.0.weight' is partitioned", "strategy.gathered("]),  # S-07
    ],
)
def test_an_update_that_would_be_lost_is_refused_by_name(
    strategy: str, where: str, precision: str, told: list[str]
) -> None:  # L-01, S-07: previously it silently kept its initial weights
    for found in on_ranks(_run, 2, strategy, 2, where, precision, process_group=None):
        assert isinstance(found, str)
        assert all(part in found for part in told), found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", KEPT_WHOLE, "zero 1", "zero 2", "zero 3"])
def test_a_teacher_without_updates_is_not_refused(strategy: str) -> None:  # L-01
    for found in on_ranks(_run, 2, strategy, 2, "nowhere", "bf16-mixed", process_group=None):
        assert not isinstance(found, str), found
