"""Optimizers that need a closure, whether or not the signature of their step requires one (I-06)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from engine_case import Regression, fit, regression
from torch import nn
from torch.optim import LBFGS, SGD

from drivetrain import ConfigurationError
from oracle.check import check
from oracle.program import Data, Optimizer, Program


class AscendingSGD(SGD):
    """Ascends along the given gradients, evaluates the closure there, and descends along its gradients."""

    behind_autograd = False
    message = "climbing wants a closure"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, self.message
        held = [one for group in self.param_groups for one in group["params"]]
        before = [one.clone() for one in held]
        for one in held:
            (one.data if self.behind_autograd else one).add_(one.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for one, value in zip(held, before, strict=True):
            one.copy_(value)
        return super().step()


class AscendingWithoutAutograd(AscendingSGD):
    """Moves the parameters through ``.data``, which autograd does not record; its assertion has no message."""

    behind_autograd, message = True, ""


class ClosureRequired(AscendingSGD):
    """Requires a closure by its signature."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class EvaluatingTwice(AscendingSGD):
    """Evaluates the closure, moves the parameters, and evaluates it again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Sharp(Regression):
    """Has a BatchNorm, whose buffers count the forwards, and logs its number of samples as a metric object."""

    def __init__(self, kind: Any, closure: bool = True) -> None:
        super().__init__()
        self.norm, self.samples = nn.BatchNorm1d(3), torchmetrics.SumMetric()
        self.kind, self.closure = kind, closure

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((self.norm(x), y))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.update(len(batch[0]))
        self.log("samples", self.samples, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "closure": True} if self.closure else optimizer


class Overridden(Sharp):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


def stepping(name: str, step: Any) -> Any:
    """Return an optimizer's class whose step calls ``step(optimizer, closure)``."""
    return type(name, (SGD,), {"step": lambda self, closure=None: step(self, closure)})


def call_none(optimizer: Any, closure: Any) -> Any:
    optimizer.defaults.get("schedule")()


def assert_something(optimizer: Any, closure: Any) -> Any:
    assert not optimizer.param_groups, "broken"


def call_in_a_helper(optimizer: Any, closure: Any) -> Any:
    with torch.enable_grad():
        return closure()


class Manual(Sharp):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def test_a_closure_reaches_the_optimizer_in_every_way(tmp_path: Path) -> None:  # I-06
    """Weights and buffers are the same; the oracle has such an optimizer, and checks them (`tests/fuzz`)."""
    found = []
    for module in (
        Sharp(AscendingSGD),
        Sharp(AscendingWithoutAutograd),
        Sharp(ClosureRequired),
        Sharp(EvaluatingTwice),  # an evaluation at the current point reuses the window's own
        Overridden(AscendingSGD),
    ):
        fit(tmp_path, gradient_clip_val=0.3, accumulate_grad_batches=2).fit(module, regression(24))
        found.append(dict(module.state_dict()))
    assert not torch.equal(found[0]["layer.weight"], Sharp(AscendingSGD).layer.weight)
    for state in found[1:]:
        torch.testing.assert_close(state, found[0])


@pytest.mark.parametrize("kind", [LBFGS, ClosureRequired])
def test_a_metric_object_sees_each_sample_once(tmp_path: Path, kind: Any) -> None:  # B-16
    runner = fit(tmp_path, accumulate_grad_batches=2)
    runner.fit(Sharp(kind), regression(12))
    assert float(runner.callback_metrics["samples"]) == 12


@pytest.mark.parametrize("kind", ["sam", "lbfgs"])
def test_each_evaluation_gets_a_batch_that_it_may_modify(kind: str) -> None:  # I-06, I-07
    data = Data(samples=12, consumes_batch=True)
    assert not check(Program(precision="64-true", data=data, optimizers=(Optimizer(kind),), accumulate=3))


@pytest.mark.parametrize(
    ("module", "kind", "cause"),
    [
        (Sharp, AscendingSGD, AssertionError),
        (Overridden, AscendingSGD, AssertionError),
        (Manual, AscendingSGD, AssertionError),
        (Manual, AscendingWithoutAutograd, AssertionError),
        (Sharp, stepping("Wraps", lambda self, closure: torch.enable_grad()(closure)()), TypeError),
        (Sharp, stepping("Calls", call_in_a_helper), TypeError),
    ],
)
def test_a_missing_closure_names_both_ways(tmp_path: Path, module: Any, kind: Any, cause: Any) -> None:  # I-06, S-12
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.step was called without a closure") as caught:
        fit(tmp_path).fit(module(kind, closure=False), regression())
    assert "'closure': True" in str(caught.value)
    assert "optimizer.step(closure)" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_loss_scaling_forbids_a_closure(tmp_path: Path) -> None:  # I-06: fp16 would refuse both ways
    with pytest.raises(ConfigurationError, match=r"(?s)without a closure.*precision='bf16-mixed' or '32-true', since"):
        fit(tmp_path, precision="16-mixed").fit(Sharp(AscendingSGD, closure=False), regression())
    with pytest.raises(ConfigurationError, match="'16-mixed' with AscendingSGD"):
        fit(tmp_path, precision="16-mixed").fit(Sharp(AscendingSGD), regression())


@pytest.mark.parametrize(
    ("module", "step", "error"),
    [
        (Sharp, assert_something, AssertionError),
        (Manual, assert_something, AssertionError),
        (Sharp, call_none, TypeError),
        (Manual, lambda *_: float("no disclosure"), ValueError),
    ],
)
def test_other_errors_of_a_step_are_unchanged(tmp_path: Path, module: Any, step: Any, error: Any) -> None:  # S-12
    with pytest.raises(error) as caught:
        fit(tmp_path).fit(module(stepping("Failing", step), closure=False), regression())
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("configured", "automatic", "named"),
    [
        (lambda one: {"optimizer": SGD(one), "closure": "yes"}, True, "'closure': 'yes'"),
        (lambda one: {"optimizer": SGD(one), "closures": True}, True, "Did you mean 'closure'?"),
        (lambda one: {"optimizer": SGD(one), "closure": True}, False, "'closure': True with manual"),
        (lambda one: {"optimizer": LBFGS(one), "closure": False}, True, "'closure': False with LBFGS"),
        (
            lambda one: [{"optimizer": SGD(one[:1]), "closure": True}, {"optimizer": SGD(one[1:])}],
            *(True, "An optimizer evaluates the loss again in its step, and there are 2 optimizers"),
        ),
    ],
)
def test_unsupported_combinations_are_refused(tmp_path: Path, configured: Any, automatic: bool, named: str) -> None:
    # I-06
    module = Regression()
    module.automatic_optimization = automatic
    module.configure_optimizers = lambda: configured(list(module.parameters()))  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(module, regression())
    assert named in str(caught.value)
