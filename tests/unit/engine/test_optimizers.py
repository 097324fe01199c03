"""Every form of configure_optimizers, when schedulers step, how many steps a run will make, and overridden hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, numbers, regression, stream
from small_modules import tiny
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from captured_warnings import captured_warnings
from drivetrain import ConfigurationError, TrainModule


class Pair(TrainModule):
    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)
        self._configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.second(self.first(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self._configure(self)


def _two(module: Any) -> list[Any]:
    return [SGD(module.first.parameters(), lr=0.1), Adam(module.second.parameters(), lr=0.01)]


def _one(module: Any) -> Any:
    return SGD(module.parameters(), lr=0.1)


def _halving(optimizer: Any) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def _lists(module: Any) -> Any:
    optimizers = _two(module)
    return optimizers, [_halving(optimizers[0]), {"scheduler": _halving(optimizers[1]), "interval": "step"}]


def _dict(module: Any, **scheduler: Any) -> Any:
    optimizer = _one(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _halving(optimizer), **scheduler}}


@pytest.mark.parametrize(
    ("configure", "optimizers", "schedulers"),
    [
        (_one, ["SGD"], []),
        (lambda module: [_one(module)], ["SGD"], []),
        (lambda module: tuple(_two(module)), ["SGD", "Adam"], []),
        (lambda module: (_two(module), []), ["SGD", "Adam"], []),
        (_lists, ["SGD", "Adam"], [("epoch", 1), ("step", 1)]),
        (lambda module: {"optimizer": _one(module)}, ["SGD"], []),
        (lambda module: {"optimizer": _one(module), "lr_scheduler": None}, ["SGD"], []),
        (_dict, ["SGD"], [("epoch", 1)]),
        (lambda module: _dict(module, interval="epoch", frequency=2), ["SGD"], [("epoch", 2)]),
        (lambda module: _dict(module, interval="step", frequency=2, name="mine"), ["SGD"], [("step", 2)]),
        (lambda module: [_dict(module)], ["SGD"], [("epoch", 1)]),
        (lambda module: None, [], []),
    ],
)
def test_every_return_form(tmp_path: Path, configure: Any, optimizers: list[str], schedulers: Any) -> None:
    module = Pair(configure)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    runner = fit(tmp_path, max_epochs=3)
    runner.fit(module, regression())
    assert [type(one).__name__ for one in runner.optimizers] == optimizers
    assert [(config.interval, config.frequency) for config in runner.lr_scheduler_configs] == schedulers
    assert [type(one) for one in runner.lr_schedulers] == [StepLR] * len(schedulers)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) is (not optimizers), name
    for config in runner.lr_scheduler_configs:
        base = config.scheduler.base_lrs[0]
        steps = {"epoch": 3, "step": 18}[config.interval] // config.frequency
        assert config.scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(base * 0.5**steps)


def _shared(module: Any) -> Any:
    return [SGD(module.parameters(), lr=0.1), SGD(module.first.parameters(), lr=0.1)]


def _plateau(module: Any) -> Any:
    optimizer = _one(module)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer)}


@pytest.mark.parametrize(
    ("configure", "named"),
    [
        (_shared, ["Optimizers 0 and 1 share", "'first.weight'", "automatic_optimization = False"]),
        (lambda module: ([_one(module)], [_halving(_one(module))]), ["StepLR", "not returned"]),
        (_plateau, ["ReduceLROnPlateau without a 'monitor'", "'monitor': 'val_loss'"]),
        (lambda module: {"optimizer": _one(module), "lr_schedular": None}, ["Did you mean 'lr_scheduler'?"]),
        (lambda module: _dict(module, intervall="step"), ["'intervall'", "Did you mean 'interval'?"]),
        (lambda module: _dict(module, interval="steps"), ["interval='steps'", "the interval 'epoch' or 'step'"]),
        (lambda module: _dict(module, frequency=0), ["frequency=0", "int of 1 or more"]),
        (lambda module: _dict(module, frequency=True), ["frequency=True"]),
        (lambda module: {"optimizer": _one(module), "lr_scheduler": {"interval": "step"}}, ["no 'scheduler'"]),
        (lambda module: {"optimizer": _one(module), "lr_scheduler": 0.1}, ["a float", "return an optimizer"]),
        (lambda module: [_one(module), "Adam"], ["a str", "return an optimizer"]),
        (lambda module: {"lr_scheduler": None}, ["no 'optimizer'"]),
    ],
)
def test_unsupported_returns_are_refused_before_the_first_step(tmp_path: Path, configure: Any, named: Any) -> None:
    module = Pair(configure)
    module.training_step = lambda *_: pytest.fail("a step was made")  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(module, regression())
    for part in named:
        assert part in str(caught.value)


def test_a_replaced_layer_is_not_added_to_another_optimizer(tmp_path: Path) -> None:
    class Replaces(Pair):
        def on_train_epoch_start(self) -> None:
            replaced, self.first = self.first, nn.Linear(3, 4)
            self.trainer.optimizers[1].add_param_group({"params": replaced.parameters()})

    with pytest.raises(ConfigurationError, match=r"Optimizer 1 \(Adam\) holds a parameter .* is not the module's"):
        fit(tmp_path).fit(Replaces(_two), regression())


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ({"max_epochs": 3, "accumulate_grad_batches": 4}, 20, 9),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 21, 6),
        ({"max_epochs": 2, "limit_train_batches": 0.5, "accumulate_grad_batches": 4}, 20, 4),
        ({"max_epochs": 3, "max_steps": 7, "accumulate_grad_batches": 4}, 20, 7),
        ({"max_epochs": -1, "max_steps": 7}, 20, 7),
        ({"max_epochs": 4, "overfit_batches": 3}, 20, 12),
        ({"fast_dev_run": 3}, 20, 3),
        ({"max_epochs": 2, "accumulate_grad_batches": 30}, 20, 2),
        ({"max_epochs": 2}, None, math.inf),
        ({"max_epochs": 2, "limit_train_batches": 3}, None, 6),
    ],
)
def test_the_estimated_steps_are_the_runs(tmp_path: Path, options: Any, samples: Any, expected: float) -> None:  # B-09
    estimates: list[float] = []

    def configure_optimizers(self: Any) -> Any:
        estimates.append(self.trainer.estimated_stepping_batches)
        return Tiny.configure_optimizers(self)

    runner = fit(tmp_path, **options)
    runner.fit(tiny(configure_optimizers=configure_optimizers), stream() if samples is None else loader(samples))
    assert estimates == [expected]
    assert runner.global_step == (8 if math.isinf(expected) else expected)
    assert runner.estimated_stepping_batches == expected


def test_an_overridden_step_may_warm_up_and_skip_and_clip_in_its_own_way(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    class WarmingUp(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            loss = optimizer_closure()
            calls.append((epoch, batch_idx, type(optimizer.optimizer).__name__, loss.requires_grad))
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (batch_idx + 1)
            if batch_idx != 1:
                optimizer.step(closure=optimizer_closure)

        def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:  # type: ignore[override]
            calls.append((type(optimizer).__name__, options))
            self.clip_gradients(optimizer, 0.5, "value")

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.05)
            return [optimizer], [{"scheduler": _halving(optimizer), "interval": "step"}]

    module, reference = WarmingUp(), Regression()
    runner = fit(tmp_path, gradient_clip_val=2.0)
    runner.fit(module, regression(12))
    clipping = {"gradient_clip_val": 2.0, "gradient_clip_algorithm": "norm"}  # by name, Q-11
    assert calls == [call for index in range(3) for call in (("SGD", clipping), (0, index, "SGD", False))]
    assert runner.global_step == 2  # the skipped step does not count
    assert runner.lr_schedulers[0].last_epoch == 2  # B-09
    # Written by hand: the rates, the skipped step and the clipping are those of overridden hooks.
    for index, batch in enumerate(regression(12)):
        optimizer = SGD(reference.parameters(), lr=0.1 * (index + 1))
        optimizer.zero_grad()
        reference.loss(batch).backward()
        assert nn.utils.clip_grad_norm_(reference.parameters(), math.inf) > 0.5
        nn.utils.clip_grad_value_(reference.parameters(), 0.5)
        if index != 1:
            optimizer.step()
    torch.testing.assert_close(module.layer.weight, reference.layer.weight)


def test_transfer_hooks_see_batches_in_order_and_batch_weight_those_of_the_loader(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Hooked(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(f"before {dataloader_idx}")
            return batch + 1

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            calls.append(f"to {device.type}")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("after")
            return batch * 10

        def batch_weight(self, batch: Any) -> int:
            weighed.append(numbers(batch))
            return 1

    weighed: list[list[int]] = []
    module = Hooked()
    options = {"num_sanity_val_steps": 0, "accumulate_grad_batches": 2}
    fit(tmp_path, **options).fit(module, loader(4), [loader(2), loader(2)])
    assert module.seen == [[10, 20], [30, 40]]
    assert module.evaluated == [[10, 20]] * 2
    assert calls == [part for index in (0, 0, 0, 1) for part in (f"before {index}", "to cpu", "after")]
    assert weighed == [[0, 1], [2, 3]]


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_an_invalid_weight_is_refused_with_rank_and_batch(tmp_path: Path, weight: float) -> None:  # B-21
    module = tiny(batch_weight=lambda self, batch: weight if batch[0, 0] == 4 else 1.0)
    with pytest.raises(ConfigurationError, match=r"batch_weight returned .* on rank 0 for batch 2"):
        fit(tmp_path, accumulate_grad_batches=2).fit(module, loader(8))


@pytest.mark.parametrize(("weightless", "window", "steps"), [([4], 1, 3), ([0, 2, 4, 6], 2, 0)])
def test_a_weightless_window_is_one_warning(tmp_path: Path, weightless: Any, window: int, steps: int) -> None:  # B-21
    module = tiny(batch_weight=lambda self, batch: 0 if int(batch[0, 0]) in weightless else 1)
    runner = fit(tmp_path, accumulate_grad_batches=window)
    with captured_warnings() as lines:
        runner.fit(module, loader(8))
    assert sum("made no step" in line for line in lines) == 1
    assert runner.global_step == steps
