"""Manual optimization and closures equal the hand-written loop, under every strategy and mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from manual_programs import (
    BATCH,
    SAMPLES,
    SCALE,
    Adding,
    Gan,
    Quasi,
    Sam,
    Searched,
    SearchedByHand,
    Sharp,
    SharpByHand,
    Untoggled,
    Wasserstein,
)
from small_runs import FEATURES, each, failing, loader, quiet, seeded, weights
from torch import nn
from torch.amp import GradScaler

from drivetrain.precision import MixedPrecision
from drivetrain_strategies import DDPStrategy
from worlds import on_ranks

# fp16 does not support closures, because every evaluation may overflow separately.
PROGRAMS = [
    (kind, precision)
    for kinds, precisions in (
        ((Gan,), ("32-true",)),
        ((Gan, Untoggled, Wasserstein), ("bf16-mixed", "16-mixed")),
        ((Adding,), ("16-mixed",)),
        ((Quasi, Sharp, SharpByHand, Searched, SearchedByHand), ("32-true", "bf16-mixed")),
    )
    for kind in kinds
    for precision in precisions
]


def _trained(kind: Any, precision: str, strategy: str, ranks: int) -> torch.Tensor | dict[str, str]:
    module = kind()
    how = (
        MixedPrecision(precision, "cpu", GradScaler("cpu", init_scale=SCALE)) if precision == "16-mixed" else precision
    )
    with failing() as failed:
        quiet(strategy=strategy, precision=how).fit(module, loader(SAMPLES, BATCH // ranks))
        return weights(module)
    return failed


def _trained_on_ranks(strategy: str) -> list[Any]:
    return each(_trained, *((kind, precision, strategy, 2) for kind, precision in PROGRAMS))


@pytest.fixture(scope="module", params=["single_device", "ddp", "fsdp"])
def runs(request: pytest.FixtureRequest) -> tuple[int, list[list[Any]]]:
    """Return the number of ranks, and each rank's weights after each program."""
    if request.param == "single_device":
        return 1, [each(_trained, *((kind, precision, request.param, 1) for kind, precision in PROGRAMS))]
    return 2, on_ranks(_trained_on_ranks, 2, request.param, process_group=None, timeout=150)


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[f"{kind.__name__}-{how}" for kind, how in PROGRAMS])
def test_manual_optimization_equals_the_hand_written_loop(runs: tuple[int, list[list[Any]]], number: int) -> None:
    # I-02, I-06, B-13, B-15, B-16
    ranks, found = runs
    kind, precision = PROGRAMS[number]
    before, expected = weights(kind()), weights(kind().by_hand(ranks, precision))
    assert (expected - before).abs().max() > 0.05  # training has changed the weights
    for trained in found:
        assert isinstance(trained[number], torch.Tensor), trained[number]
        torch.testing.assert_close(trained[number], expected, atol=1e-6, rtol=1e-5)


class Normalised(Gan):
    """Has buffers that depend on a rank's own data; records the buffers at the start of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)))
        self.begun_with: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begun_with.append(torch.cat([one.detach().float().flatten() for one in self.buffers()]).clone())
        super().training_step(batch, batch_idx)


class Thawing(Normalised):
    """Changes its trainable parameters between steps, so that DDP is rebuilt (I-03)."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.critic.parameters():
            parameter.requires_grad_(batch_idx % 2 == 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.begun_with.append(torch.cat([one.detach().float().flatten() for one in self.buffers()]).clone())
        for_maker, _ = self.optimizers()
        for_maker.zero_grad()
        self.manual_backward(self.maker_loss(*batch))
        for_maker.step()


def _buffers(kind: type[Normalised], broadcast: bool | None) -> torch.Tensor:
    module = kind()
    quiet(strategy=DDPStrategy(broadcast_buffers=broadcast)).fit(module, loader(SAMPLES, BATCH // 2))
    return torch.stack(module.begun_with)


def _all_buffers() -> list[torch.Tensor]:
    return each(_buffers, (Normalised, True), (Normalised, None), (Thawing, True), (Normalised, False))


def test_ddp_broadcasts_buffers_in_manual_optimization() -> None:
    # I-02, C-03
    first, second = on_ranks(_all_buffers, 2, process_group=None)
    for own, others in list(zip(first, second, strict=True))[:3]:
        assert len(own.unique(dim=0)) == len(own)  # buffers change
        assert torch.equal(own, others)
    assert not torch.equal(first[3], second[3])
    for one in (first[1], first[3]):  # rank 0's are its own, regardless of the others
        assert torch.equal(first[0], one)


class Forgetful(Gan):
    """Leaves a toggle open."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.toggle_optimizer(self.optimizers()[1])
        self.manual_backward(self.critic_loss(*batch))
        self.optimizers()[1].step()


def _left_open(strategy: str) -> tuple[dict[str, str], bool]:
    module = Forgetful()
    with failing() as failed:
        quiet(strategy=strategy).fit(module, loader(SAMPLES, BATCH // 2))
    return failed, all(parameter.requires_grad for parameter in module.parameters())


def _all_left_open() -> list[Any]:
    return each(_left_open, ("ddp",), ("fsdp",))


def test_a_toggle_that_is_left_open_is_refused_on_every_rank() -> None:
    # I-02, I-03
    for found in on_ranks(_all_left_open, 2, process_group=None):
        for failed, whole in found:
            assert failed["type"] == "ConfigurationError"
            assert "Forgetful.training_step ended with SGD toggled" in failed["text"]
            assert whole


def _without_closure(strategy: str, precision: str) -> dict[str, str]:
    with failing() as failed:
        module = Sharp()
        module.configure_optimizers = lambda: Sam(module.parameters())  # type: ignore[method-assign]
        quiet(strategy=strategy, precision=precision).fit(module, loader(SAMPLES, BATCH // 2))
    return failed


def _all_without_closure() -> list[dict[str, str]]:
    return each(_without_closure, ("ddp", "32-true"), ("fsdp", "bf16-mixed"), ("ddp", "16-mixed"))


def test_a_missing_closure_names_both_fixes_on_every_rank() -> None:
    # I-06
    for found in on_ranks(_all_without_closure, 2, process_group=None):
        for failed in found:
            assert failed["type"] == "ConfigurationError"
            assert "'closure': True" in failed["text"]
            assert "optimizer.step(closure)" in failed["text"]
