"""A teacher within the module that user code updates (EMA): updated exactly, or refused by name. Row L-01."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import assert_near, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import TrainModule
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 32, 8
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp, kept whole": lambda: FSDPStrategy(reshard_after_forward=False),
    "zero 1": lambda: DeepSpeedStrategy(stage=1),
    "zero 2": lambda: DeepSpeedStrategy(stage=2),
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


class Student(TrainModule):
    """Distils a teacher that is updated in ``where``: in a "step", in a "hook", or "gathered" there, as ZeRO
    requires.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.student = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.where = where

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        found = self.student(x).float()
        return (found - target.float()).square().mean() + found.square().mean()

    @torch.no_grad()
    def move(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            teacher.lerp_(student.detach(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        if self.where == "step":
            self.move()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "hook":
            self.move()
        elif self.where == "gathered":
            import deepspeed

            weights = [*self.teacher.parameters(), *self.student.parameters()]
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
                self.move()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))


def by_hand(where: str) -> dict[str, Tensor]:
    model = Student(where)
    optimizer = model.configure_optimizers()
    for (x,) in DataLoader(rows(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = model.loss(x)
        if where == "step":
            model.move()
        loss.backward()
        optimizer.step()
        if where != "step":
            model.move()
    return model.state_dict()


def _run(strategy: str, world: int, where: str, precision: str) -> dict[str, Tensor] | str:
    module = Student(where)
    fit = quiet(strategy=STRATEGIES[strategy](), devices=world, precision=precision)
    try:
        fit.fit(module, DataLoader(rows(), batch_size=BATCH // world), DataLoader(rows(), batch_size=BATCH))
    except ConfigurationError as error:
        return str(error)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "world", "where"),
    [
        ("single", 1, "step"),
        ("single", 1, "hook"),
        ("ddp", 2, "step"),
        ("ddp", 2, "hook"),
        ("fsdp", 2, "hook"),
        ("fsdp, kept whole", 2, "hook"),
        ("zero 1", 2, "step"),
        ("zero 2", 2, "hook"),
        ("zero 3", 2, "gathered"),
    ],
)
def test_a_teacher_updated_by_hand_is_exact(strategy: str, world: int, where: str) -> None:  # L-01
    wanted = by_hand(where)
    for found in on_ranks(_run, world, strategy, world, where, "32-true", process_group=None):
        assert not isinstance(found, str), found
        assert_near(found, wanted)


@pytest.mark.parametrize(
    ("strategy", "where", "precision", "said"),
    [
        ("fsdp, kept whole", "step", "32-true", "update the weights in on_train_batch_end"),
        ("fsdp, kept whole", "step", "bf16-mixed", "update the weights in on_train_batch_end"),
        ("zero 3", "gathered", "bf16-mixed", "the update changed half-precision copies"),
        ("zero 1", "hook", "bf16-mixed", "the update changed half-precision copies"),
        ("zero 2", "step", "bf16-mixed", "the update changed half-precision copies"),
    ],
)
def test_an_update_that_would_be_lost_is_refused_by_name(
    strategy: str, where: str, precision: str, said: str
) -> None:  # L-01: previously it silently kept its initial weights
    for found in on_ranks(_run, 2, strategy, 2, where, precision, process_group=None):
        assert isinstance(found, str)
        assert "User code updated weights" in found
        assert "'teacher.0.weight'" in found
        assert said in found


def test_an_update_of_partitioned_weights_in_a_hook_is_refused_by_name() -> None:  # L-01, S-07
    for found in on_ranks(_run, 2, "zero 3", 2, "hook", "32-true", process_group=None):
        assert "'student.0.weight' is partitioned" in found
        assert "strategy.gathered(" in found


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_a_teacher_without_updates_is_unchanged(strategy: str) -> None:  # L-01
    for found in on_ranks(_run, 2, strategy, 2, "nowhere", "bf16-mixed", process_group=None):
        assert not isinstance(found, str), found
