"""Steps that are not one per loss: manual optimization in one process, and optimizers that need a closure."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from engine_case import Regression, fit, regression
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD

from drivetrain import ConfigurationError
from drivetrain.callbacks import LambdaCallback
from drivetrain.precision import MixedPrecision
from oracle.check import check
from oracle.program import Data, Optimizer, Program


class ByHand(Regression):
    """Runs a function as the training step of manual optimization, and keeps its optimizers."""

    automatic_optimization = False

    def __init__(self, step: Callable[[Any, Any], Any], kind: Callable[..., Any] = SGD) -> None:
        super().__init__()
        self.step, self.kind, self.turn = step, kind, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = self.optimizers()
        self.step(self, batch)
        self.turn += 1

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


class TwoByHand(ByHand):
    """Has an optimizer for its bias and one for its weight."""

    def configure_optimizers(self) -> Any:
        return [SGD([self.layer.bias], lr=0.1), SGD([self.layer.weight], lr=0.1)]

    def trained(self) -> list[bool]:
        return [self.layer.bias.requires_grad, self.layer.weight.requires_grad]


def fp16(scale: float, growth_interval: int = 2000) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=scale, growth_interval=growth_interval))


def backward(module: Any, batch: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    loss = module.loss(batch)
    module.manual_backward(loss)
    return loss


def _keeps_gradients(module: Any, batch: Any) -> None:
    """Accumulates into gradients after a step, and steps twice with the same gradients."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    for _ in range(2):
        module.manual_backward(module.loss(batch))
        optimizer.step()
    optimizer.step()


def _steps_later(module: Any, batch: Any, clips: bool) -> None:
    """One of two optimizers steps in the next training_step."""
    often, seldom = module.optimizers()
    if module.turn % 2 == 0:
        with module.toggled_optimizer(seldom):
            backward(module, batch, seldom)
            if clips:
                module.clip_gradients(seldom, 0.1)
    else:
        seldom.step()
    with module.toggled_optimizer(often):
        backward(module, batch, often)
        often.step()


def _steps_and_goes_backward(module: Any, batch: Any) -> None:
    """Steps with the gradients of the previous training_step."""
    optimizer = module.optimizers()
    optimizer.step()
    backward(module, batch, optimizer)


@pytest.mark.parametrize(
    ("kind", "step", "grows"),
    [
        (ByHand, _keeps_gradients, False),
        (TwoByHand, partial(_steps_later, clips=True), True),
        (TwoByHand, partial(_steps_later, clips=False), True),
        (ByHand, _steps_and_goes_backward, True),
    ],
)
def test_gradients_may_step_again_and_later(tmp_path: Path, kind: Any, step: Any, grows: bool) -> None:
    # I-02, B-15: where the scale doubles after every training_step, so do the pending gradients
    found = []
    scaled = fp16(256.0, growth_interval=1 if grows else 2000)
    for precision in ("32-true", scaled):
        module = kind(step)
        before = module.layer.weight.detach().clone()
        fit(tmp_path, precision=precision).fit(module, regression())
        found.append(module.layer.weight.detach() - before)
    assert (scaled.state_dict()["scale"] > 1024) == grows
    assert float(found[0].norm()) > 0.02
    torch.testing.assert_close(found[1], found[0], atol=5e-3 if step is _keeps_gradients else 5e-4, rtol=1e-2)


def test_an_overflow_skips_only_its_own_step(tmp_path: Path) -> None:
    # I-02, B-15: the next backward of the same training_step is checked separately; the scale is halved once.
    stepped: list[bool | None] = []

    def step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch) * factor)
            optimizer.step()
            stepped.append(optimizer.stepped)

    precision = fp16(1024.0)
    fit(tmp_path, precision=precision).fit(ByHand(step), regression(4))
    assert stepped == [True, False, True]
    assert precision.state_dict()["scale"] == 512.0


def test_a_forward_sees_changed_weights_despite_the_cast_cache(tmp_path: Path) -> None:  # I-02
    seen: list[tuple[float, float]] = []

    def step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()
        by_user_code = partial(torch.nn.init.constant_, module.layer.weight, 1.5)
        for change in (lambda: None, optimizer.step, by_user_code):
            change()
            expected = torch.nn.functional.linear(*(one.bfloat16() for one in (batch[0], *module.layer.parameters())))
            seen.append((module.layer(batch[0]).float().sum().item(), expected.float().sum().item()))
            backward(module, batch, optimizer)

    fit(tmp_path, precision="bf16-mixed").fit(ByHand(step), regression(4))
    assert len({found for found, _ in seen}) == 3  # the weight did change
    assert [found for found, _ in seen] == pytest.approx([expected for _, expected in seen], rel=2e-2, abs=2e-2)


class Twice(SGD):
    """Evaluates a closure twice if it gets one; works without one too."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
                closure()
        return super().step()


def _steps_with_a_closure(module: Any, batch: Any) -> None:
    optimizer, losses = module.optimizers(), []

    def closure() -> torch.Tensor:
        losses.append(backward(module, batch, optimizer))
        return losses[-1]

    module.returned = optimizer.step(closure).item()
    assert optimizer.stepped
    module.losses = [one.item() for one in losses]


@pytest.mark.parametrize(("kind", "evaluations"), [(Twice, 2), (SGD, 1), (partial(LBFGS, max_iter=1), 1)])
def test_a_closure_reaches_the_optimizer(tmp_path: Path, kind: Any, evaluations: int) -> None:
    # I-02, I-06: on_before_optimizer_step is called once, with gradients
    module: Any = ByHand(_steps_with_a_closure, kind)
    norms: list[float] = []
    noting = LambdaCallback(on_before_optimizer_step=lambda *_: norms.append(float(module.layer.weight.grad.norm())))
    fit(tmp_path, callbacks=noting).fit(module, regression(4))
    assert module.losses == [pytest.approx(module.returned)] * evaluations
    assert len(norms) == 1
    assert norms[0] > 0


def test_a_closure_under_loss_scaling_is_refused(tmp_path: Path) -> None:  # I-02, I-06
    # Each evaluation may overflow separately; torch's own optimizers evaluate once, and work.
    fit(tmp_path, precision=fp16(1024.0)).fit(ByHand(_steps_with_a_closure), regression(4))
    with pytest.raises(ConfigurationError, match="Twice steps with a closure, which precision='16-mixed'"):
        fit(tmp_path, precision="16-mixed").fit(ByHand(_steps_with_a_closure, Twice), regression(4))
    with pytest.raises(ConfigurationError, match="'16-mixed' with AscendingSGD"):
        fit(tmp_path, precision="16-mixed").fit(Sharp(AscendingSGD), regression())


def _toggles_each(module: Any, batch: Any) -> None:
    first, second = module.optimizers()
    for optimizer, same, expected in ((first, first, [True, False]), (second, second.optimizer, [False, True])):
        module.toggle_optimizer(optimizer)
        assert module.trained() == expected
        module.untoggle_optimizer(same)
        assert module.trained() == [True, True]


def _toggles_both(module: Any, batch: Any) -> None:
    for optimizer in module.optimizers():
        module.toggle_optimizer(optimizer)


@pytest.mark.parametrize(
    ("step", "automatic", "error"),
    [
        (_toggles_each, False, None),
        (lambda module, _: module.toggle_optimizer(module.optimizers()[0]), False, "ended while an optimizer was"),
        (_toggles_both, False, "toggled a second optimizer while"),
        (_toggles_both, True, "toggle_optimizer was called in automatic optimization"),
    ],
)
def test_toggling_freezes_the_others(tmp_path: Path, step: Any, automatic: bool, error: str | None) -> None:  # I-02
    module = TwoByHand(step)
    module.automatic_optimization = automatic
    with pytest.raises(ConfigurationError, match=error) if error else nullcontext():
        fit(tmp_path).fit(module, regression(4))
    assert module.trained() == [True, True]


def test_backward_and_steps_are_outside_of_autocast(tmp_path: Path) -> None:  # I-02: as in a hand-written loop
    calls: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        calls.append((what, torch.is_autocast_enabled("cpu")))

    class NotesAutocast(SGD):
        def step(self, closure: Any = None) -> Any:
            note("step")
            if closure is not None:
                closure()
            return super().step()

    class Sums(ByHand):
        def backward(self, loss: Any) -> None:  # the loss of a step by hand may have elements
            loss.sum().backward()

    def training_step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()

        def evaluate() -> torch.Tensor:
            loss = module.loss(batch).expand(2)
            note("forward")
            loss.register_hook(lambda gradient: note("backward"))
            module.manual_backward(loss)
            return loss

        evaluate()
        optimizer.step(evaluate)
        note("forward")

    fit(tmp_path, precision="bf16-mixed").fit(Sums(training_step, NotesAutocast), regression(4))
    evaluation = [("forward", True), ("backward", False)]
    assert calls == [*evaluation, ("step", False), *evaluation, ("forward", True)]


def test_a_module_that_keeps_its_optimizer_can_be_copied(tmp_path: Path) -> None:
    module = ByHand(_keeps_gradients)
    fit(tmp_path).fit(module, regression(8))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(again.state_dict(), module.state_dict(), rtol=0, atol=0)
        assert again.kept.param_groups[0]["params"][0] is next(again.parameters())


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
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class EvaluatingTwice(AscendingSGD):
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
    return type(name, (SGD,), {"step": lambda self, closure=None: step(self, closure)})


def assert_something(optimizer: Any, closure: Any) -> Any:
    assert not optimizer.param_groups, "broken"


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
        (Sharp, stepping("Calls", lambda self, closure: closure()), TypeError),
    ],
)
def test_a_missing_closure_names_both_ways(tmp_path: Path, module: Any, kind: Any, cause: Any) -> None:  # I-06, S-12
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.step was called without a closure") as caught:
        fit(tmp_path).fit(module(kind, closure=False), regression())
    assert "'closure': True" in str(caught.value)
    assert "optimizer.step(closure)" in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize(
    ("module", "step", "error"),
    [
        (Sharp, assert_something, AssertionError),
        (Manual, assert_something, AssertionError),
        (Sharp, lambda self, _: self.defaults.get("schedule")(), TypeError),
        (Manual, lambda *_: float("no disclosure"), ValueError),
    ],
)
def test_other_errors_of_a_step_are_unchanged(tmp_path: Path, module: Any, step: Any, error: Any) -> None:  # S-12
    with pytest.raises(error) as caught:
        fit(tmp_path).fit(module(stepping("Failing", step), closure=False), regression())
    assert type(caught.value) is error
