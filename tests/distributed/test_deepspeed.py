"""DeepSpeedStrategy on two ranks: rows E-01, E-05, E-09, E-13, and D-11, B-02, B-05, B-08, B-17 under ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_nets import Block, DeepRegression
from small_runs import TIGHT, global_batches, loader, quiet, same_on_two_ranks, train_by_hand, weights

from drivetrain_strategies import DeepSpeedStrategy

EVERYTHING_SPREAD: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}  # E-13
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, nothing whole": EVERYTHING_SPREAD,
    "stage 1, offload": {"stage": 1, "offload_optimizer": "cpu"},
    "stage 2, offload": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, offload": {**EVERYTHING_SPREAD, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "stage 2, small buckets": {"stage": 2, "reduce_bucket_size": 100, "allgather_bucket_size": 100},
    "stage 2, overlapped": {"stage": 2, "overlap_comm": True, "contiguous_gradients": False},
    "stage 3, small groups": {**EVERYTHING_SPREAD, "sub_group_size": 100, "reduce_bucket_size": 100},
    "stage 3, no prefetch": {**EVERYTHING_SPREAD, "stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0},
    "stage 2, checkpointed": {"stage": 2, "activation_checkpointing": [Block]},
    "stage 3, checkpointed": {**EVERYTHING_SPREAD, "activation_checkpointing": [Block]},
    "stage 3, leaf modules": {**EVERYTHING_SPREAD, "leaf_modules": [Block]},
}


class Plain(DeepRegression):
    """Uses SGD without momentum, which shows wrong gradient scales: Adam would compensate for them."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


class Weighted(Plain):
    """Weights samples one or two, unevenly over micro-batches and ranks."""

    def batch_weight(self, batch: Any) -> int:
        return int(self.counts(batch[0]).sum())

    def counts(self, x: torch.Tensor) -> torch.Tensor:
        return 1 + (x[:, :1] > 0.3).long()

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        counts = self.counts(x)
        return (counts * (self.net(x) - y).square()).sum() / counts.sum()


def _by_hand(module: Any, window: int, epochs: int = 2) -> torch.Tensor:
    optimizer = module.configure_optimizers()
    module.configure_optimizers = lambda: optimizer
    for _ in range(epochs):
        train_by_hand(module, global_batches(40, 8), window=window)
    return weights(module)


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        module = DeepRegression()
        quiet(strategy=DeepSpeedStrategy(**options), accumulate_grad_batches=2, max_epochs=2).fit(module, loader(40, 4))
        found[name] = weights(module)
    for stage in (1, 2, 3):
        for window in (1, 2, 4):
            module = Plain()
            strategy = DeepSpeedStrategy(stage=stage)
            quiet(strategy=strategy, accumulate_grad_batches=window, max_epochs=2).fit(module, loader(40, 4))
            found[f"SGD, stage {stage}, windows of {window}"] = weights(module)
        module = Weighted()
        quiet(strategy=DeepSpeedStrategy(stage=stage), accumulate_grad_batches=2).fit(module, loader(40, 4))
        found[f"SGD, stage {stage}, weighted"] = weights(module)
    return found


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    return same_on_two_ranks(_runs)


@pytest.mark.parametrize("name", CASES)
def test_every_setting_gives_the_same_results(name: str, trained: dict[str, torch.Tensor]) -> None:
    # E-01, E-05, E-13, B-02: 5 micro-batches in windows of two, the last one short
    torch.testing.assert_close(trained[name], _by_hand(DeepRegression(), 2), **TIGHT)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_gradients_are_divided_once(stage: int, window: int, trained: dict[str, torch.Tensor]) -> None:
    # E-01, E-09, B-02: short last windows, except for windows of one
    found = trained[f"SGD, stage {stage}, windows of {window}"]
    torch.testing.assert_close(found, _by_hand(Plain(), window), **TIGHT)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sample_weights_are_applied_once(stage: int, trained: dict[str, torch.Tensor]) -> None:
    # E-01, B-03: windows of two, the last one short, each as one batch
    module = train_by_hand(Weighted(), global_batches(40, 16))
    torch.testing.assert_close(trained[f"SGD, stage {stage}, weighted"], weights(module), **TIGHT)
