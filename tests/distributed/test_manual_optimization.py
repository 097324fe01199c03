"""Manual optimization and closures under every strategy and mixed precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, each, loader, quiet, refusal, seeded
from torch import nn

from drivetrain import TrainModule
from drivetrain_strategies import DDPStrategy
from oracle.check import check
from oracle.program import Data, Optimizer, Program, Turn
from worlds import on_ranks

TWO = (Optimizer(of="body"), Optimizer("momentum", of="head"))
PROGRAMS = {
    # I-02, B-13, B-15
    "two optimizers in turn": Program(
        optimizers=TWO, manual=(Turn(1, toggles=True), Turn(toggles=True)), precision="32-true"
    ),
    "without toggles, bf16": Program(optimizers=TWO, manual=(Turn(1), Turn()), precision="bf16-mixed"),
    "several steps, clipped twice, fp16": Program(
        optimizers=TWO, manual=(Turn(1, repeats=3, clips=2, toggles=True), Turn(toggles=True)), precision="16-mixed"
    ),
    # I-06, B-16. fp16 does not support closures, because every evaluation may overflow separately.
    "LBFGS by hand": Program(optimizers=(Optimizer("lbfgs"),), manual=(Turn(closure=True),)),
    "SAM": Program(optimizers=(Optimizer("sam"),)),
    "SAM, bf16": Program(optimizers=(Optimizer("sam"),), precision="bf16-mixed"),
    "SAM by hand, bf16": Program(optimizers=(Optimizer("sam"),), manual=(Turn(closure=True),), precision="bf16-mixed"),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize(("strategy", "ranks"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
def test_programs_equal_the_oracle(strategy: str, ranks: int, program: Program) -> None:  # I-02, I-06
    assert not check(replace(program, strategy=strategy, ranks=ranks, data=Data(samples=12)))


class TwoPlayers(TrainModule):
    """A network in two parts, whose optimizers take turns."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.maker = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)))
        self.critic = seeded(lambda: nn.Linear(FEATURES, 1))
        self.buffers_at_start: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.buffers_at_start.append(torch.cat([one.detach().float().flatten() for one in self.buffers()]).clone())
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.critic(self.maker(batch[0])).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.maker, self.critic)]


class Thawing(TwoPlayers):
    """Changes its trainable parameters between steps, so that DDP is rebuilt (I-03)."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.critic.requires_grad_(batch_idx % 2 == 1)


def _buffers(kind: type[TwoPlayers], broadcast: bool | None) -> torch.Tensor:
    module = kind()
    quiet(strategy=DDPStrategy(broadcast_buffers=broadcast)).fit(module, loader(24, 4))
    return torch.stack(module.buffers_at_start)


def test_ddp_broadcasts_buffers_in_manual_optimization() -> None:  # I-02, C-03
    cases = (TwoPlayers, True), (TwoPlayers, None), (Thawing, True), (TwoPlayers, False)
    first, second = on_ranks(each, 2, _buffers, *cases, process_group=None)
    for own, others in list(zip(first, second, strict=True))[:3]:
        assert len(own.unique(dim=0)) == len(own)  # buffers change
        assert torch.equal(own, others)
    assert not torch.equal(first[3], second[3])
    for one in (first[1], first[3]):  # rank 0's are its own, regardless of the others
        assert torch.equal(first[0], one)


class LeavesAToggleOpen(TwoPlayers):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.toggle_optimizer(self.optimizers()[1])


class Sam(torch.optim.SGD):
    """Needs a closure, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM requires closure, but it was not provided"
        return super().step(closure)


class WithoutClosure(Regression):
    def configure_optimizers(self) -> Any:
        return Sam(self.parameters(), lr=0.1)


def _refusal(kind: type[TrainModule], strategy: str, precision: str) -> tuple[str, bool]:
    module = kind()
    text = refusal(module, loader(24, 4), strategy=strategy, precision=precision)
    return text, all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (LeavesAToggleOpen, ["LeavesAToggleOpen.training_step ended with SGD toggled"]),  # I-02, I-03
        (WithoutClosure, ["'closure': True", "optimizer.step(closure)"]),  # I-06
    ],
)
def test_mistakes_are_refused_on_every_rank(kind: Any, parts: list[str]) -> None:
    cases = [(kind, "ddp", "32-true"), (kind, "fsdp", "bf16-mixed")]
    for found in on_ranks(each, 2, _refusal, *cases, process_group=None):
        for text, all_trainable in found:
            assert text.startswith("ConfigurationError")
            assert all(part in text for part in parts), text
            assert all_trainable
