"""What training_step may return, windows with skipped micro-batches, closures, manual optimization, and zero_grad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, loader, regression
from small_modules import linear, tiny
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError, TrainModule
from drivetrain.callbacks import LambdaCallback
from oracle.check import check
from oracle.program import Data, Program


class Outputs(Callback):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs)


def returning(make: Callable[[torch.Tensor, int], Any], **methods: Any) -> Regression:
    """A module whose step returns a function of its loss and of the index of the micro-batch."""
    return linear(training_step=lambda self, batch, batch_idx: make(self.loss(batch), batch_idx), **methods)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_dict_reaches_the_hooks_complete_detached_and_unscaled(tmp_path: Path, precision: str) -> None:
    made: list[dict[str, Any]] = []

    def make(loss: torch.Tensor, batch_idx: int) -> Any:
        made.append({"loss": loss, "text": "x", "deep": {"list": [loss * 3, 1]}})
        return made[-1]

    outputs = Outputs()
    run = fit(tmp_path, callbacks=outputs, accumulate_grad_batches=3, precision=precision)
    run.fit(returning(make), regression(12))
    assert len(outputs.kept) == 3
    for kept, given in zip(outputs.kept, made, strict=True):
        assert kept.keys() == given.keys()
        assert torch.equal(kept["loss"], given["loss"])  # neither divided by the window nor scaled
        assert not kept["loss"].requires_grad
        assert not kept["deep"]["list"][0].requires_grad
        assert (kept["text"], kept["deep"]["list"][1]) == ("x", 1)


def test_a_dict_needs_a_loss_which_may_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)a dict.*dict with 'loss'"):
        fit(tmp_path).fit(returning(lambda loss, _: {"Loss": loss}), regression(8))
    with captured_warnings() as lines:
        fit(tmp_path).fit(returning(lambda loss, _: {"loss": None, "other": loss}), regression(8))
    assert sum("made no step" in line for line in lines) == 1


def test_batch_idx_may_be_omitted_in_any_step(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = tiny(
        training_step=lambda self, batch: self.layer(batch).mean(),
        validation_step=lambda self, batch, dataloader_idx: seen.append((int(batch[0, 0]), dataloader_idx)),
        test_step=lambda self, batch: seen.append(int(batch[0, 0])),
        predict_step=lambda self, batch: int(batch[0, 0]),
    )
    runner = fit(tmp_path, num_sanity_val_steps=0)
    runner.fit(module, loader(4), [loader(4), loader(2)])
    runner.test(module, loader(4), verbose=False)
    assert runner.predict(module, loader(4)) == [0, 2]
    assert seen == [(0, 0), (2, 0), (0, 1), 0, 2]


@pytest.mark.parametrize(
    ("skipped", "size", "steps"), [({1, 5}, 1, 4), ({1, 5}, 2, 3), ({0, 3, 4, 5}, 3, 1), ({2}, 4, 2)]
)
def test_a_window_without_a_loss_makes_no_step(tmp_path: Path, skipped: set[int], size: int, steps: int) -> None:
    module = returning(lambda loss, batch_idx: None if batch_idx in skipped else loss)
    outputs = Outputs()
    runner = fit(tmp_path, accumulate_grad_batches=size, callbacks=outputs)
    with captured_warnings() as lines:
        runner.fit(module, regression(22))
    assert runner.global_step == steps
    assert [kept == {} for kept in outputs.kept] == [index in skipped for index in range(6)]
    windows = -(-6 // size)
    assert sum("Net.training_step returned no loss" in line for line in lines) == (steps < windows)


@pytest.mark.parametrize(("precision", "accumulate"), [("32-true", 1), ("32-true", 3), ("16-mixed", 2)])
def test_a_step_is_over_the_micro_batches_with_a_loss(precision: str, accumulate: int) -> None:
    """The gradients are rescaled to the weights that contributed; the last micro-batch has a single sample."""
    data = Data(samples=13)
    program = Program(data=data, precision=precision, accumulate=accumulate, missing_loss="odd", epochs=2)
    assert not check(program), "the engine refused the program"


def test_a_closure_returns_the_mean_over_the_micro_batches_with_a_loss(tmp_path: Path) -> None:  # B-16
    searching = {
        "configure_optimizers": lambda self: LBFGS(self.parameters(), 0.3, max_iter=4, line_search_fn="strong_wolfe")
    }
    module = returning(lambda loss, batch_idx: None if batch_idx == 1 else loss, **searching)
    fit(tmp_path, accumulate_grad_batches=3).fit(module, regression(24))
    reference, batches = linear(**searching), list(regression(24))
    windows = [[batches[0], batches[2]], batches[3:]]
    fit(tmp_path).fit(reference, [[torch.cat(parts) for parts in zip(*window, strict=True)] for window in windows])
    torch.testing.assert_close(module.layer.weight, reference.layer.weight, atol=1e-4, rtol=1e-4)


def test_values_logged_by_a_closure_are_those_of_the_first_evaluation(tmp_path: Path) -> None:  # B-16
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("calls", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    configure = {"configure_optimizers": lambda self: LBFGS(self.parameters(), max_iter=5)}
    module, outputs = linear(training_step=step, **configure), Outputs()
    first = module.loss(next(iter(regression(4)))).item()
    runner = fit(tmp_path, callbacks=outputs)
    runner.fit(module, regression(4))
    assert float(outputs.kept[0]["loss"]) == pytest.approx(first)
    assert float(runner.callback_metrics["loss_epoch"]) == pytest.approx(first)
    assert float(runner.callback_metrics["calls"]) == 1


class Manual(TrainModule):
    """Two layers take turns, each with its optimizer and scheduler."""

    automatic_optimization = False

    def __init__(self, returned: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        self.returned = returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for layer, optimizer, scheduler in zip(self.layers, self.optimizers(), self.lr_schedulers(), strict=True):
            with self.toggled_optimizer(optimizer):
                optimizer.zero_grad()
                self.manual_backward(layer(batch[0]).mean())
                optimizer.step()
            scheduler.step()
        return self.returned

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.layers[0].parameters(), lr=0.1), Adam(self.layers[1].parameters(), lr=0.01)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]


@pytest.mark.parametrize(
    ("returned", "arrives"), [(None, {}), ({"a": 1}, {"a": 1}), (torch.tensor(2.0), {"loss": torch.tensor(2.0)})]
)
def test_hooks_of_manual_optimization_and_its_schedulers(tmp_path: Path, returned: Any, arrives: Any) -> None:
    calls: list[str] = []

    class Watching(Outputs):
        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            calls.append("before_backward")

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            calls.append("after_backward")

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            calls.append(type(optimizer).__name__)

    watching = Watching()
    runner = fit(tmp_path, callbacks=watching)
    runner.fit(Manual(returned), regression(4))
    assert calls == ["before_backward", "after_backward", "SGD", "before_backward", "after_backward", "Adam"]
    assert watching.kept == [arrives]
    # The module steps its schedulers, and nothing else does.
    rates = [optimizer.param_groups[0]["lr"] for optimizer in runner.optimizers]
    assert rates == pytest.approx([0.09, 0.009])


def test_manual_optimization_refuses_accumulation(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"accumulate_grad_batches=2.* with manual optimization"):
        fit(tmp_path, accumulate_grad_batches=2).fit(Manual(), regression())


class Clearing(SGD):
    """Clears gradients in place, so that references to them stay valid."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none=False)


def set_on_the_instance(parameters: Any, lr: float) -> Any:
    held = list(parameters)
    optimizer, clearing = SGD(held, lr), Clearing(held, lr)
    optimizer.zero_grad = clearing.zero_grad  # type: ignore[method-assign]
    optimizer.clearing = clearing  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("make", [Clearing, set_on_the_instance])
def test_an_overridden_zero_grad_is_called_once_per_window(tmp_path: Path, make: Any) -> None:
    runner = fit(tmp_path, max_steps=3, accumulate_grad_batches=2)
    runner.fit(tiny(configure_optimizers=lambda self: make(self.parameters(), 0.1)), loader(12))
    optimizer: Any = runner.optimizers[0]
    assert getattr(optimizer, "clearing", optimizer).cleared == 3


def test_gradients_of_every_group_are_freed_before_the_next_forward(tmp_path: Path) -> None:
    """The memory of old gradients is free for the forward's activations."""
    seen: list[bool] = []
    hooks: dict[str, list[Any]] = {"on_before_zero_grad": [], "on_before_optimizer_step": []}

    def recording(hook: str) -> Any:
        def record(trainer: Any, module: Any, optimizer: Any) -> None:
            assert optimizer is trainer.optimizers[0]
            hooks[hook].append((module.layer.bias.grad is not None, trainer.global_step))

        return record

    def configure_optimizers(self: Any) -> Any:
        optimizer = SGD([self.layer.weight], lr=0.1)
        optimizer.add_param_group({"params": [self.layer.bias, self.unused]})
        return optimizer

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.extend(one.grad is None for one in (self.layer.weight, self.layer.bias))
        seen.append(self.frozen.grad is not None)  # it is in no optimizer
        return self.layer(batch).mean()

    module: Any = tiny(configure_optimizers=configure_optimizers, training_step=step)
    module.unused, module.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    module.frozen.grad = torch.ones(2)
    callback = LambdaCallback(**{hook: recording(hook) for hook in hooks})
    fit(tmp_path, max_steps=3, callbacks=callback).fit(module, loader())
    assert seen == [True] * 9
    assert hooks["on_before_zero_grad"] == [(False, 0), (True, 1), (True, 2)]
    assert hooks["on_before_optimizer_step"] == [(True, 0), (True, 1), (True, 2)]  # not counted yet
