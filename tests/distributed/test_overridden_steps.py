"""``backward`` and ``optimizer_zero_grad`` of a module are called as Lightning calls them (Q-11)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_runs import FEATURES, about, failing, loader, quiet, seeded, weights
from torch import nn
from torch.amp import GradScaler

from drivetrain import TrainModule
from drivetrain.precision import MixedPrecision, Precision
from worlds import on_ranks

SAMPLES, BATCH, EPOCHS = 20, 4, 2
SCALE = 1024.0


class Doubled(TrainModule):
    """Trains on twice the loss of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 2 * self.loss(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

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


def _trained(kind: type[Doubled], strategy: str, precision: str, ranks: int, window: int) -> Any:
    module = kind()
    how: Any = precision
    if precision == "16-mixed":
        how = MixedPrecision(precision, "cpu", GradScaler("cpu", init_scale=SCALE))
    fit = quiet(strategy=strategy, precision=how, max_epochs=EPOCHS, accumulate_grad_batches=window)
    fit.fit(module, loader(SAMPLES, BATCH // ranks))
    return weights(module), getattr(module, "calls", [])


def _both(strategy: str, precision: str, ranks: int, window: int) -> list[Any]:
    kinds = (Doubled, DoublesInBackward) if window > 1 else (Doubled, DoublesInBackward, DoublesInManualBackward)
    return [_trained(kind, strategy, precision, ranks, window) for kind in kinds]


CASES = [
    ("single_device", 1, "32-true"),
    ("single_device", 1, "bf16-mixed"),
    ("single_device", 1, "16-mixed"),
    ("ddp", 2, "32-true"),
    ("ddp", 2, "16-mixed"),
    ("ddp_find_unused_parameters_true", 2, "32-true"),
    ("fsdp", 2, "32-true"),
    ("fsdp", 2, "bf16-mixed"),
]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("strategy", "ranks", "precision"), CASES)
def test_the_overrides_train_like_the_module_without_them(
    strategy: str, ranks: int, precision: str, window: int
) -> None:
    results = (
        on_ranks(_both, ranks, strategy, precision, ranks, window)
        if ranks > 1
        else [_both(strategy, precision, 1, window)]
    )
    for (wanted, _), *others in results:
        for found, _ in others:
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5, msg=about((strategy, precision)))


def test_static_graph_and_windows() -> None:
    for (wanted, _), (found, _) in on_ranks(_both, 2, "ddp_static_graph", "32-true", 2, 2):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_they_are_called_with_the_arguments_of_lightning() -> None:
    (_, (_, calls)) = _both("single_device", "32-true", 1, 2)
    windows = [[("zero_grad", epoch, first, "SGD")] for epoch in range(EPOCHS) for first in (0, 2, 4)]
    batches = [[0, 1], [2, 3], [4]] * EPOCHS
    wanted = [
        call for opening, each_one in zip(windows, batches, strict=True) for call in [*opening, *_backwards(each_one)]
    ]
    assert calls == wanted


def _backwards(batches: list[int]) -> list[Any]:
    return [("backward", batch_idx) for batch_idx in batches]


class OwnBackward(Precision):
    """Runs backward without `run_backward`, as precisions did before there was one."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def _refused(**settings: Any) -> str:
    with failing() as failed:
        quiet(**settings).fit(DoublesInBackward(), loader(SAMPLES, BATCH // 2))
    return failed["text"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_which_runs_backward_itself_refuses_an_override(stage: int) -> None:
    refused = on_ranks(partial(_refused, strategy=f"deepspeed_stage_{stage}"), 2)
    assert all("DoublesInBackward.backward" in text and "DeepSpeedStrategy" in text for text in refused), refused


def test_a_precision_that_does_not_call_the_override_is_refused() -> None:
    assert "DoublesInBackward.backward" in _refused(precision=OwnBackward())


class SetsModes(Doubled):
    """Keeps dropout-like layers training in validation, and notes the modes."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Dropout(0.5)
        self.modes: list[Any] = []

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.noise.train()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.noise.eval()

    def on_predict_model_eval(self) -> None:
        self.modes.append("predict")
        super().on_predict_model_eval()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(("validation", self.training, self.noise.training))

    test_step = validation_step

    def on_train_epoch_end(self) -> None:
        self.modes.append(("after", self.training, self.noise.training))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.modes.append(("prediction", self.training, self.noise.training))
        return torch.zeros(1)


def test_hooks_set_the_modes_of_evaluations() -> None:
    module, fit = SetsModes(), quiet()
    fit.fit(module, loader(4, 4), loader(4, 4))
    assert module.modes == [("validation", False, True), ("after", True, False)]
    assert all(layer.training for layer in module.modules())  # a run restores the modes from before it
    module.modes.clear()
    fit.test(module, loader(4, 4))
    fit.predict(module, loader(4, 4))
    assert module.modes == [("validation", False, False), "predict", ("prediction", False, False)]


def test_gradient_clipping_gets_its_arguments_by_name() -> None:
    class Clips(Doubled):
        def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:  # type: ignore[override]
            assert options == {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}
            self.clip_gradients(optimizer, **options)

    overridden, plain = Clips(), Doubled()
    for module in (overridden, plain):
        quiet(gradient_clip_val=0.1).fit(module, loader(8, 4))
    assert torch.equal(weights(overridden), weights(plain))

    class Renamed(Doubled):
        def configure_gradient_clipping(self, optimizer: Any, value: Any, algorithm: Any) -> None: ...  # type: ignore[override]

    with failing() as failed:
        quiet(gradient_clip_val=0.1).fit(Renamed(), loader(8, 4))
    assert (
        "write def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm)"
        in (failed["text"])
    )
