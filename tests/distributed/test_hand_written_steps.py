"""Backward, steps, clipping by hand: an error where the engine does them (Q-10), and overridden methods (Q-11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Regression, about, each, loader, quiet, refusal, weights
from torch.amp import GradScaler

from captured_warnings import captured_warnings
from drivetrain import ConfigurationError, DataModule, TrainModule
from drivetrain.precision import MixedPrecision, Precision
from worlds import on_ranks


class ByHand(Regression):
    """Does one thing that the engine does, or that cannot be done."""

    kept: Any = 0.0

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.kept
        if self.mistake == "backward":
            loss.backward()
        if self.mistake == "step":
            self.trainer.optimizers[0].step()
        if self.mistake == "step of the handle":
            self.optimizers().step()
        if self.mistake == "keeps a graph":
            self.kept = loss * 0.1
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.mistake == "backward in a validation":
            self.loss(batch).backward()


BY_HAND = ["ConfigurationError", "training_step", "self.automatic_optimization = False"]
MISTAKES = {
    "backward": BY_HAND,
    "step": BY_HAND,
    "step of the handle": BY_HAND,
    "backward in a validation": ["ConfigurationError", "without gradients"],
    "keeps a graph": ["RuntimeError", "backward through the graph a second time"],  # torch's, as it is
}


def _refusal(mistake: str, strategy: str) -> str:
    return refusal(ByHand(mistake), loader(8, 2), loader(4, 2), strategy=strategy)


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_a_backward_or_a_step_by_hand_is_refused_with_the_way_out(strategy: str) -> None:
    mistakes = MISTAKES if strategy == "single_device" else [*MISTAKES][:4]
    cases = [(mistake, strategy) for mistake in mistakes]
    for texts in [each(_refusal, *cases)] if strategy == "single_device" else on_ranks(each, 2, _refusal, *cases):
        for text, mistake in zip(texts, mistakes, strict=True):
            error, *words = MISTAKES[mistake]
            assert text.startswith(error), (mistake, text)
            assert all(word in text for word in words), (mistake, text)


class Penalized(Regression):
    """Differentiates for a penalty, and has gradients of zeros instead of none."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)


class Probed(Regression):
    """Trains a layer with an optimizer that the engine does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = torch.nn.Linear(4, 1)
        self.probing = torch.optim.SGD(self.probe.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.probing.zero_grad()
        self.probe(batch[0]).square().mean().backward()
        self.probing.step()
        return self.loss(batch)


class Clearing(Regression):
    """Has gradients of an earlier run, which its step clears."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        return self.loss(batch)


class Together(Regression):
    """Steps every optimizer in an overridden ``optimizer_step``."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for one in self.optimizers() if optimizer is self.optimizers()[0] else []:
            one.step(optimizer_closure)


class Wrapping(torch.optim.Optimizer):
    """Has not called ``Optimizer.__init__``, so that no hook can be registered."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Wrapped(Regression):
    def configure_optimizers(self) -> Any:
        return Wrapping(super().configure_optimizers())


@pytest.mark.parametrize("kind", [Penalized, Probed, Clearing, Together, Wrapped])
def test_what_is_no_step_by_hand_is_trained(kind: type[Regression]) -> None:
    fit, module = quiet(), kind()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit.fit(module, loader(8, 2))
    assert fit.global_step == 4
    assert not any(map(torch.equal, before, module.parameters()))


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def _warnings(samples: int) -> list[str]:
    with captured_warnings() as lines:
        quiet(strategy="ddp", max_epochs=3).fit(Manual(), loader(samples, 2))
    return [line for line in lines if "samples" in line]


def test_uneven_ranks_under_manual_optimization_are_one_warning() -> None:
    (uneven, even), (others, more) = on_ranks(each, 2, _warnings, (7,), (8,))
    (message,) = uneven + others
    assert "Rank 0 has 2 samples in a micro-batch of 3 samples on 2 ranks" in message
    assert even == more == []


def test_loading_on_an_instance_and_hyper_parameters_that_were_not_saved_name_the_way_out() -> None:
    for kind in (Regression, DataModule):
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.load_from_checkpoint"):
            kind().load_from_checkpoint("path")

    class Forgetful(TrainModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(self.hparams.width, 1)

    with pytest.raises(AttributeError, match=r"call self\.save_hyperparameters\(\)"):
        Forgetful()


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


class DoublesInManualBackward(Manual, DoublesInBackward):
    pass


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
def test_overrides_train_like_a_module_without(strategy: str, ranks: int, precision: str, windows: Any) -> None:
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


def _refused(strategy: str) -> str:
    return refusal(DoublesInBackward(), loader(SAMPLES, BATCH // 2), strategy=strategy)


def test_overrides_that_would_not_be_called_are_refused() -> None:
    batches = loader(SAMPLES, BATCH)
    assert "DoublesInBackward.backward" in refusal(DoublesInBackward(), batches, precision=PlainBackward())
    # DeepSpeed runs backward itself.
    for text in on_ranks(each, 2, _refused, ("deepspeed_stage_1",), ("deepspeed_stage_3",))[0]:
        assert "DoublesInBackward.backward" in text
        assert "DeepSpeedStrategy" in text
