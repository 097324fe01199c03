"""Overridden ``backward``, ``optimizer_zero_grad``, and clipping (Q-11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Regression, about, each, loader, quiet, refusal, weights
from torch.amp import GradScaler

from drivetrain.precision import MixedPrecision, Precision
from worlds import on_ranks

SAMPLES, BATCH, EPOCHS = 20, 4, 2


class Doubled(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 2 * self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class DoublesInBackward(Doubled):
    """The same, but the loss is doubled in `backward`, and gradients are set to zero instead of None."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("backward", self.trainer.batch_idx))
        super().backward(2 * loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append(("zero_grad", epoch, batch_idx, type(optimizer).__name__))
        optimizer.zero_grad(set_to_none=False)


class DoublesInManualBackward(DoublesInBackward):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def _train_each(strategy: str, precision: str, ranks: int, window: int) -> list[Any]:
    kinds = (Doubled, DoublesInBackward) if window > 1 else (Doubled, DoublesInBackward, DoublesInManualBackward)
    modules = [kind() for kind in kinds]
    for module in modules:
        scaled = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))
        how: Any = scaled if precision == "16-mixed" else precision
        fit = quiet(strategy=strategy, precision=how, max_epochs=EPOCHS, accumulate_grad_batches=window)
        fit.fit(module, loader(SAMPLES, BATCH // ranks))
    return [weights(module) for module in modules]


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision", "windows"),
    [
        ("single_device", 1, "32-true", (1, 2)),
        ("single_device", 1, "16-mixed", (1,)),
        ("ddp", 2, "32-true", (1, 2)),
        ("ddp", 2, "16-mixed", (2,)),
        ("ddp_static_graph", 2, "32-true", (2,)),
        ("fsdp", 2, "32-true", (1, 2)),
        ("fsdp", 2, "bf16-mixed", (1,)),
    ],
)
def test_the_overrides_train_like_the_module_without_them(
    strategy: str, ranks: int, precision: str, windows: tuple[int, ...]
) -> None:
    for window in windows:
        for wanted, *others in on_ranks(_train_each, ranks, strategy, precision, ranks, window):
            for found in others:
                torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5, msg=about((strategy, window)))


def test_the_overrides_are_called_with_the_arguments_of_lightning() -> None:
    module = DoublesInBackward()
    quiet(max_epochs=EPOCHS, accumulate_grad_batches=2).fit(module, loader(SAMPLES, BATCH))
    wanted: list[Any] = []
    for epoch in range(EPOCHS):
        for window in ([0, 1], [2, 3], [4]):
            wanted += [("zero_grad", epoch, window[0], "SGD"), *(("backward", batch_idx) for batch_idx in window)]
    assert module.calls == wanted


class PlainBackward(Precision):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class ClipsWithOtherNames(Doubled):
    def configure_gradient_clipping(self, optimizer: Any, value: Any, algorithm: Any) -> None: ...  # type: ignore[override]


def _refused(strategy: str) -> str:
    return refusal(DoublesInBackward(), loader(SAMPLES, BATCH // 2), strategy=strategy)


def test_overrides_that_would_not_be_called_are_refused() -> None:
    batches = loader(SAMPLES, BATCH)
    assert "DoublesInBackward.backward" in refusal(DoublesInBackward(), batches, precision=PlainBackward())
    way_out = "write def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm)"
    assert way_out in refusal(ClipsWithOtherNames(), batches, gradient_clip_val=0.1)
    # DeepSpeed runs backward itself.
    for text in on_ranks(each, 2, _refused, ("deepspeed_stage_1",), ("deepspeed_stage_3",))[0]:
        assert "DoublesInBackward.backward" in text
        assert "DeepSpeedStrategy" in text
