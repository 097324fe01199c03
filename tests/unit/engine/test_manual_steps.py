"""Manual optimization in one process: several steps, closures and toggled optimizers within one training_step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engine_case import Regression, fit, regression
from torch.amp import GradScaler
from torch.optim import SGD, Adam

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


def norm(module: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


class Norms(Callback):
    """Records the gradient norm before each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(norm(module))


def _steps_thrice(module: Any, batch: Any) -> None:
    optimizer = module.optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()


def _clips_twice(module: Any, batch: Any) -> None:
    optimizer = module.optimizers()
    for _ in range(2):
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        module.clip_gradients(optimizer, 0.5)
        module.clip_gradients(optimizer, 0.4)
        optimizer.step()


def _steps_on(module: Any, batch: Any) -> None:
    """Accumulates into gradients after a step, and steps twice with the same gradients."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    for _ in range(2):
        module.manual_backward(module.loss(batch))
        optimizer.step()
    optimizer.step()


def _looks_between(module: Any, batch: Any) -> None:
    """Clips the gradients of half a batch before those of the other half are added."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch) / 2)
    module.clip_gradients(optimizer, 0.3)
    module.manual_backward(module.loss(batch) / 2)
    optimizer.step()


@pytest.mark.parametrize("step", [_steps_thrice, _clips_twice, _steps_on, _looks_between])
def test_gradients_are_unscaled_once_whatever_a_training_step_does(tmp_path: Path, step: Any) -> None:
    # I-02, B-15: full precision is the reference. Previously the second norm was 65,536 times the first.
    found = []
    for precision in ("32-true", MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))):
        module, norms = ByHand(step), Norms()
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


def test_clipped_gradients_may_step_in_a_later_training_step(tmp_path: Path) -> None:
    # I-02: the other optimizer's step ends with a scale update; previously the gradients were divided by the scale
    # twice.
    found = []
    for precision in ("32-true", MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))):
        module = _Two(_clips_now_and_steps_later)
        before = module.layer.weight.detach().clone()
        fit(tmp_path, precision=precision).fit(module, regression())
        found.append(module.layer.weight.detach() - before)
    assert float(found[0].norm()) > 0.02
    torch.testing.assert_close(found[1], found[0], atol=5e-4, rtol=1e-2)


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


@pytest.mark.parametrize(("kind", "step"), [(_Two, _backward_now_and_steps_later), (ByHand, _steps_and_goes_backward)])
def test_pending_gradients_follow_the_scale(tmp_path: Path, kind: Any, step: Any) -> None:
    # I-02: the scale doubles after every training_step, and so do the gradients
    found = []
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for precision in ("32-true", MixedPrecision("16-mixed", "cpu", scaler)):
        module = kind(step)
        before = module.layer.weight.detach().clone()
        fit(tmp_path, precision=precision).fit(module, regression())
        found.append(module.layer.weight.detach() - before)
    assert scaler.get_scale() > 1024
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

    precision = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=1024.0))
    fit(tmp_path, precision=precision).fit(ByHand(step), regression(4))
    assert stepped == [True, False, True]
    assert precision.state_dict()["scale"] == 512.0


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_forward_sees_changed_weights_despite_the_cast_cache(tmp_path: Path, precision: str) -> None:
    # I-02: after a step, after a backward with a change by user code, and within a closure
    seen: list[tuple[float, float]] = []

    def step(module: Any, batch: Any) -> None:
        def look() -> None:
            x = batch[0]
            dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
            by_hand = x.to(dtype) @ module.layer.weight.detach().to(dtype).T + module.layer.bias.detach().to(dtype)
            seen.append((float(module.layer(x).float().sum()), float(by_hand.float().sum())))

        def closure() -> torch.Tensor:
            look()
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        optimizer = module.optimizers()
        look()
        optimizer.step(closure)
        look()
        optimizer.step(closure)
        look()
        closure()
        with torch.no_grad():
            module.layer.weight.mul_(1.5)
        look()
        with torch.no_grad():
            module.layer.weight.mul_(1.5)
        torch.clear_autocast_cache()  # for changes without a call of ours, the user clears the cache
        look()

    scaler = GradScaler("cpu", init_scale=1024.0) if precision == "16-mixed" else None
    fit(tmp_path, precision=MixedPrecision(precision, "cpu", scaler)).fit(ByHand(step), regression(4))
    assert len({first for first, _ in seen}) == 5  # the weight did change
    assert [first for first, _ in seen] == pytest.approx([second for _, second in seen], rel=2e-2, abs=2e-2)


class Twice(SGD):
    """Evaluates a closure twice if it gets one; works without one too."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
                closure()
        return super().step()


@pytest.mark.parametrize(("kind", "times"), [(Twice, 2), (SGD, 1), (Adam, 1)])
def test_a_closure_reaches_the_optimizer(tmp_path: Path, kind: Any, times: int) -> None:
    # I-02, I-06; and on_before_optimizer_step is called once, with gradients
    calls: list[int] = []
    norms = Norms()

    def step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()

        def closure() -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        first = float(module.loss(batch))
        assert float(optimizer.step(closure)) == pytest.approx(first)
        assert optimizer.stepped

    module = ByHand(step)
    module.configure_optimizers = lambda: kind(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    fit(tmp_path, callbacks=norms).fit(module, regression(4))
    assert len(calls) == times
    assert len(norms.found) == 1
    assert norms.found[0] > 0


def test_a_closure_under_loss_scaling_is_refused(tmp_path: Path) -> None:
    # I-02, I-06: under fp16 each evaluation may overflow separately; torch's own optimizers evaluate once, and work
    def step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()

        def closure() -> None:
            optimizer.zero_grad()
            module.manual_backward(module.loss(batch))

        optimizer.step(closure)

    module = ByHand(step)
    fit(tmp_path, precision="16-mixed").fit(module, regression(4))
    module.configure_optimizers = lambda: Twice(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="Twice steps with a closure, which precision='16-mixed'"):
        fit(tmp_path, precision="16-mixed").fit(module, regression(4))


class TestToggles:
    """I-02: toggle_optimizer and untoggle_optimizer, in addition to the context manager."""

    def _run(self, tmp_path: Path, step: Callable[[Any, Any], Any]) -> Any:
        module = ByHand(step)
        one, other = [module.layer.weight], [module.layer.bias]
        module.configure_optimizers = lambda: [SGD(one, lr=0.1), SGD(other, lr=0.1)]  # type: ignore[method-assign]
        fit(tmp_path).fit(module, regression(4))
        return module

    def test_do_what_the_context_manager_does(self, tmp_path: Path) -> None:
        def step(module: Any, batch: Any) -> None:
            first, second = module.optimizers()
            flags = (module.layer.weight, module.layer.bias)
            module.toggle_optimizer(first)
            assert [one.requires_grad for one in flags] == [True, False]
            module.untoggle_optimizer(first)
            assert [one.requires_grad for one in flags] == [True, True]
            module.toggle_optimizer(second)
            assert [one.requires_grad for one in flags] == [False, True]
            module.untoggle_optimizer(second.optimizer)
            assert [one.requires_grad for one in flags] == [True, True]

        self._run(tmp_path, step)

    @pytest.mark.parametrize(
        ("step", "said"),
        [
            (lambda module, _: module.toggle_optimizer(module.optimizers()[0]), "training_step ended with SGD toggled"),
            (lambda module, _: module.untoggle_optimizer(module.optimizers()[0]), "but none is toggled"),
            (
                lambda module, _: [module.toggle_optimizer(one) for one in module.optimizers()],
                r"toggle_optimizer\(SGD\), while SGD is toggled",
            ),
        ],
    )
    def test_open_toggles_are_refused_and_undone(self, tmp_path: Path, step: Any, said: str) -> None:
        seen: list[Any] = []

        def kept(module: Any, batch: Any) -> None:
            seen.append(module)
            step(module, batch)

        with pytest.raises(ConfigurationError, match=said):
            self._run(tmp_path, kept)
        assert all(parameter.requires_grad for parameter in seen[0].parameters())

    def test_in_automatic_optimization_are_refused(self, tmp_path: Path) -> None:
        class Confused(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.toggle_optimizer(self.optimizers())

        with pytest.raises(ConfigurationError, match="toggle_optimizer was called in automatic optimization"):
            fit(tmp_path).fit(Confused(), regression())


class _Told(torch.autograd.Function):
    """Records whether autocast is enabled in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, said: list[tuple[str, bool]]) -> torch.Tensor:
        ctx.said = said
        said.append(("forward", torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.said.append(("backward", torch.is_autocast_enabled("cpu")))
        return gradients[0], None


class _Asks(torch.optim.SGD):
    """Evaluates a closure if it gets one, and records whether autocast is enabled."""

    said: ClassVar[list[tuple[str, bool]]] = []

    def step(self, closure: Any = None) -> Any:
        self.said.append(("step", torch.is_autocast_enabled("cpu")))
        if closure is not None:
            closure()
        return super().step()


@pytest.mark.parametrize("by_closure", [False, True])
def test_backward_and_steps_are_outside_of_autocast(tmp_path: Path, by_closure: bool) -> None:
    # I-02: as in a hand-written loop; previously products that the forward computed in float32 were cast in backward
    said = _Asks.said = []

    def training_step(module: Any, batch: Any) -> None:
        optimizer = module.optimizers()

        def evaluate() -> torch.Tensor:
            loss = _Told.apply(module.loss(batch), said).square().mean()
            optimizer.zero_grad()
            module.manual_backward(loss)
            return loss

        if by_closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        said.append(("forward", torch.is_autocast_enabled("cpu")))

    class Asking(ByHand):
        def configure_optimizers(self) -> Any:
            return _Asks(self.parameters(), lr=0.1)

    fit(tmp_path, precision="bf16-mixed", max_steps=1).fit(Asking(training_step), regression(4))
    evaluation = [("forward", True), ("backward", False)]
    step = [("step", False)]
    assert said == [*(step + evaluation if by_closure else evaluation + step), ("forward", True)]


class _KeepsItsOptimizer(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept = self.optimizers()
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_that_keeps_its_optimizer_can_be_copied(tmp_path: Path, copied: Any) -> None:
    module = _KeepsItsOptimizer(_steps_thrice)
    fit(tmp_path).fit(module, regression(8))
    again = copied(module)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), module.parameters(), strict=True))
    assert again.kept.param_groups[0]["params"][0] is next(again.parameters())
