"""Manual optimization in one process: several steps, closures and toggled optimizers within one training_step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engine_case import Regression, fit, regression
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Adam

from drivetrain import Callback, ConfigurationError
from drivetrain.precision import MixedPrecision


class ByHand(Regression):
    """Runs a function as the training step of manual optimization."""

    automatic_optimization = False

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._step(self, batch)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def fp16(scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=scale))


class Norms(Callback):
    """Records the gradient norm before each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [one.grad for one in module.parameters() if one.grad is not None]
        self.found.append(float(torch.nn.utils.get_total_norm(gradients)))


def _steps_on(module: Any, batch: Any) -> None:
    """Accumulates into gradients after a step, and steps twice with the same gradients."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    for _ in range(2):
        module.manual_backward(module.loss(batch))
        optimizer.step()
    optimizer.step()


def test_gradients_that_are_kept_are_unscaled_once(tmp_path: Path) -> None:
    # I-02, B-15: full precision is the reference
    found = []
    for precision in ("32-true", fp16(1024.0)):
        module, norms = ByHand(_steps_on), Norms()
        runner = fit(tmp_path, precision=precision, callbacks=norms)
        runner.fit(module, regression())
        assert runner.global_step == 6
        found.append((module.layer.weight.detach(), norms.found))
    torch.testing.assert_close(found[1][0], found[0][0], atol=5e-3, rtol=5e-3)
    assert found[1][1] == pytest.approx(found[0][1], rel=2e-2, abs=5e-3)
    assert runner.precision.state_dict()["_growth_tracker"] == 6  # one update per training_step


class _Two(ByHand):
    """Steps its weight in every second training_step and its bias in each."""

    turn = 0

    def configure_optimizers(self) -> Any:
        return [SGD([self.layer.bias], lr=0.1), SGD([self.layer.weight], lr=0.1)]


def _clips_now_and_steps_later(module: Any, batch: Any) -> None:
    often, seldom = module.optimizers()
    with module.toggled_optimizer(often):
        often.zero_grad()
        module.manual_backward(module.loss(batch))
        often.step()
    with module.toggled_optimizer(seldom):
        if module.turn % 2 == 0:
            seldom.zero_grad()
            module.manual_backward(module.loss(batch))
            module.clip_gradients(seldom, 0.1)
        else:
            seldom.step()
    module.turn += 1


def _backward_now_and_steps_later(module: Any, batch: Any) -> None:
    often, seldom = module.optimizers()
    if module.turn % 2 == 0:
        with module.toggled_optimizer(seldom):
            seldom.zero_grad()
            module.manual_backward(module.loss(batch))
    else:
        seldom.step()
    with module.toggled_optimizer(often):
        often.zero_grad()
        module.manual_backward(module.loss(batch))
        often.step()
    module.turn += 1


def _steps_and_goes_backward(module: Any, batch: Any) -> None:
    """Steps with the gradients of the previous training_step."""
    optimizer = module.optimizers()
    optimizer.step()
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))


@pytest.mark.parametrize(
    ("kind", "step", "grows"),
    [
        (_Two, _clips_now_and_steps_later, False),
        (_Two, _backward_now_and_steps_later, True),
        (ByHand, _steps_and_goes_backward, True),
    ],
)
def test_gradients_may_step_in_a_later_training_step(tmp_path: Path, kind: Any, step: Any, grows: bool) -> None:
    # I-02: where the scale doubles after every training_step, so do the pending gradients
    found = []
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=1 if grows else 2000)
    for precision in ("32-true", MixedPrecision("16-mixed", "cpu", scaler)):
        module = kind(step)
        before = module.layer.weight.detach().clone()
        fit(tmp_path, precision=precision).fit(module, regression())
        found.append(module.layer.weight.detach() - before)
    assert (scaler.get_scale() > 1024) == grows
    assert float(found[0].norm()) > 0.02
    torch.testing.assert_close(found[1], found[0], atol=5e-4, rtol=1e-2)


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


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_a_forward_sees_changed_weights_despite_the_cast_cache(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    # I-02: after a step, within a closure, and after a backward with a change by user code
    seen: list[tuple[float, float]] = []

    def step(module: Any, batch: Any) -> None:
        def look() -> None:
            weight, bias = module.layer.weight.detach().to(dtype), module.layer.bias.detach().to(dtype)
            expected = batch[0].to(dtype) @ weight.T + bias
            seen.append((float(module.layer(batch[0]).float().sum()), float(expected.float().sum())))

        def closure() -> torch.Tensor:
            look()
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        optimizer = module.optimizers()
        for _ in range(2):
            look()
            optimizer.step(closure)
        look()
        closure()
        with torch.no_grad():
            module.layer.weight.mul_(1.5)
        look()

    scaler = GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None
    fit(tmp_path, precision=MixedPrecision(precision, "cpu", scaler)).fit(ByHand(step), regression(4))
    assert len({found for found, _ in seen}) == 4  # the weight did change
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
    optimizer = module.optimizers()

    def closure() -> torch.Tensor:
        module.evaluations += 1
        optimizer.zero_grad()
        loss = module.loss(batch)
        module.manual_backward(loss)
        return loss

    module.first = float(module.loss(batch).detach())
    module.returned = float(optimizer.step(closure))
    assert optimizer.stepped


class _Closing(ByHand):
    evaluations = 0

    def __init__(self, kind: Any) -> None:
        super().__init__(_steps_with_a_closure)
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("kind", "evaluations"), [(Twice, 2), (SGD, 1), (Adam, 1), (partial(LBFGS, max_iter=1), 1)])
def test_a_closure_reaches_the_optimizer(tmp_path: Path, kind: Any, evaluations: int) -> None:
    # I-02, I-06; and on_before_optimizer_step is called once, with gradients
    module, norms = _Closing(kind), Norms()
    fit(tmp_path, callbacks=norms).fit(module, regression(4))
    assert module.returned == pytest.approx(module.first)
    assert module.evaluations == evaluations
    assert len(norms.found) == 1
    assert norms.found[0] > 0


def test_a_closure_under_loss_scaling_is_refused(tmp_path: Path) -> None:
    # I-02, I-06: under fp16 each evaluation may overflow separately; torch's own optimizers evaluate once, and work
    fit(tmp_path, precision=fp16(1024.0)).fit(_Closing(SGD), regression(4))
    with pytest.raises(ConfigurationError, match="Twice steps with a closure, which precision='16-mixed'"):
        fit(tmp_path, precision="16-mixed").fit(_Closing(Twice), regression(4))


class Toggling(ByHand):
    """Has two optimizers, of which a step toggles."""

    def configure_optimizers(self) -> Any:
        return [SGD([self.layer.weight], lr=0.1), SGD([self.layer.bias], lr=0.1)]

    def trained(self) -> list[bool]:
        return [self.layer.weight.requires_grad, self.layer.bias.requires_grad]


def test_toggle_optimizer_does_what_the_context_manager_does(tmp_path: Path) -> None:  # I-02
    def step(module: Any, batch: Any) -> None:
        first, second = module.optimizers()
        module.toggle_optimizer(first)
        assert module.trained() == [True, False]
        module.untoggle_optimizer(first)
        assert module.trained() == [True, True]
        module.toggle_optimizer(second)
        assert module.trained() == [False, True]
        module.untoggle_optimizer(second.optimizer)
        assert module.trained() == [True, True]

    fit(tmp_path).fit(Toggling(step), regression(4))


def _toggles_both(module: Any, batch: Any) -> None:
    for optimizer in module.optimizers():
        module.toggle_optimizer(optimizer)


@pytest.mark.parametrize(
    ("step", "automatic", "error"),
    [
        (lambda module, _: module.toggle_optimizer(module.optimizers()[0]), False, "ended with SGD toggled"),
        (lambda module, _: module.untoggle_optimizer(module.optimizers()[0]), False, "but none is toggled"),
        (_toggles_both, False, r"toggle_optimizer\(SGD\), while SGD is toggled"),
        (_toggles_both, True, "toggle_optimizer was called in automatic optimization"),
    ],
)
def test_open_toggles_are_refused_and_undone(tmp_path: Path, step: Any, automatic: bool, error: str) -> None:  # I-02
    module = Toggling(step)
    module.automatic_optimization = automatic
    with pytest.raises(ConfigurationError, match=error):
        fit(tmp_path).fit(module, regression(4))
    assert module.trained() == [True, True]


class _StepRecordsAutocast(SGD):
    """Evaluates a closure if it gets one, and records whether autocast is enabled."""

    calls: ClassVar[list[tuple[str, bool]]] = []

    def step(self, closure: Any = None) -> Any:
        self.calls.append(("step", torch.is_autocast_enabled("cpu")))
        if closure is not None:
            closure()
        return super().step()


@pytest.mark.parametrize("by_closure", [False, True])
def test_backward_and_steps_are_outside_of_autocast(tmp_path: Path, by_closure: bool) -> None:
    # I-02: as in a hand-written loop
    calls = _StepRecordsAutocast.calls = []

    def training_step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()

        def evaluate() -> torch.Tensor:
            loss = module.loss(batch)
            calls.append(("forward", torch.is_autocast_enabled("cpu")))
            loss.register_hook(lambda gradient: calls.append(("backward", torch.is_autocast_enabled("cpu"))))
            optimizer.zero_grad()
            module.manual_backward(loss)
            return loss

        if by_closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        calls.append(("forward", torch.is_autocast_enabled("cpu")))

    module = ByHand(training_step)
    module.configure_optimizers = lambda: _StepRecordsAutocast(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    fit(tmp_path, precision="bf16-mixed", max_steps=1).fit(module, regression(4))
    evaluation = [("forward", True), ("backward", False)]
    step = [("step", False)]
    assert calls == [*(step + evaluation if by_closure else evaluation + step), ("forward", True)]


class _KeepsItsOptimizer(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = self.optimizers()
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_that_keeps_its_optimizer_can_be_copied(tmp_path: Path, copied: Any) -> None:
    module = _KeepsItsOptimizer(_steps_on)
    fit(tmp_path).fit(module, regression(8))
    again = copied(module)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), module.parameters(), strict=True))
    assert again.kept.param_groups[0]["params"][0] is next(again.parameters())
