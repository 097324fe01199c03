"""Optimizers that keep references to gradients: what they kept stays as it was, under every strategy."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from small_runs import FEATURES, TIGHT, Regression, about, global_batches, loader, quiet, seeded, weights
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import Strategy
from drivetrain_strategies import DeepSpeedStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8


class Optimistic(Optimizer):
    """Steps along 2 g_t - g_{t-1} (Daskalakis et al. 2018, https://arxiv.org/abs/1711.00141)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.kept: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    previous = self.kept.get(parameter, parameter.grad)
                    self.kept[parameter] = parameter.grad
                    parameter.sub_(2 * parameter.grad - previous, alpha=group["lr"])


class AddingSam(Optimizer):
    """Steps along the sum of the gradient at the parameters and the gradient a little higher."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            closure()
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        first: list[Any] = [one.grad for one in held]
        before = [one.clone() for one in held]
        for one, gradient in zip(held, first, strict=True):
            one.add_(gradient, alpha=0.5)
        with torch.enable_grad():
            closure()
        for one, gradient, value in zip(held, first, before, strict=True):
            assert one.grad is not None
            one.copy_(value).sub_(one.grad + gradient, alpha=self.defaults["lr"])


class Program(NamedTuple):
    """One way to use an optimizer that keeps gradients.

    Attributes:
        kind: the optimizer.
        settings: of `Fit`.
        closure: whether the optimizer gets a closure.
        manual: whether ``training_step`` steps the optimizer.
        alone: whether the module has a single parameter, whose gradient a strategy need not copy to flatten it.
        set_to_none: how manual optimization clears gradients. False zeroes the gradient that the optimizer kept, in a
            hand-written loop too.
    """

    kind: type[Optimistic] | type[AddingSam] = Optimistic
    settings: dict[str, Any] = {}  # noqa: RUF012
    closure: bool = False
    manual: bool = False
    alone: bool = False
    set_to_none: bool = True

    @property
    def window(self) -> int:
        return int(self.settings.get("accumulate_grad_batches", 1))

    @property
    def max_norm(self) -> float | None:
        return self.settings.get("gradient_clip_val")


PROGRAMS = {
    "plain": Program(),
    "one parameter": Program(alone=True),
    "accumulated": Program(settings={"accumulate_grad_batches": 2}),
    "clipped": Program(settings={"gradient_clip_val": 0.3}),
    "closure": Program(closure=True),
    "closure, accumulated": Program(closure=True, settings={"accumulate_grad_batches": 2}),
    "sam": Program(AddingSam, closure=True),
    "manual": Program(manual=True),
    "manual, zeroed in place": Program(manual=True, set_to_none=False),
    "manual sam": Program(AddingSam, closure=True, manual=True),
}


class Keeping(Regression):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        if program.alone:
            self.net = seeded(lambda: nn.Linear(FEATURES, 1, bias=False))
        self.automatic_optimization = not program.manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.program.manual:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        evaluate = self.evaluation(optimizer, lambda: [(self.loss(batch), 1.0)], self.manual_backward)
        if self.program.closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        return None

    def evaluation(self, optimizer: Any, losses: Any, backward: Any) -> Any:
        """Return a closure that clears gradients, and runs backward and clipping."""

        def evaluate() -> Tensor:
            optimizer.zero_grad(set_to_none=self.program.set_to_none)
            total = torch.zeros(())
            for loss, share in losses():
                backward(loss * share)
                total = total + loss.detach() * share
            if self.program.max_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters(), self.program.max_norm)
            return total

        return evaluate

    def by_hand(self) -> Keeping:
        optimizer = self.program.kind(self.parameters())
        batches, window = global_batches(SAMPLES, BATCH), self.program.window
        for start in range(0, len(batches), window):
            parts = batches[start : start + window]
            evaluate = self.evaluation(
                optimizer,
                lambda parts=parts: ((self.loss(part), 1 / len(parts)) for part in parts),
                torch.Tensor.backward,
            )
            if self.program.closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
        return self

    def configure_optimizers(self) -> Any:
        optimizer = self.program.kind(self.parameters())
        automatic_closure = self.program.closure and not self.program.manual
        return {"optimizer": optimizer, "closure": True} if automatic_closure else optimizer


def _trained(strategy: str | Strategy, program: Program, ranks: int, precision: str = "32-true") -> Tensor:
    module = Keeping(program)
    fit = quiet(strategy=strategy, precision=precision, **program.settings)
    fit.fit(module, loader(SAMPLES, BATCH // ranks))
    return weights(module)


def _some_programs(strategy: str, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: _trained(strategy, PROGRAMS[name], 2) for name in names}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_static_graph", "fsdp"])
def test_a_kept_gradient_stays_as_it_was(strategy: str) -> None:
    programs = {name: program for name, program in PROGRAMS.items() if not (program.manual and "static" in strategy)}
    for found in on_ranks(_some_programs, 2, strategy, tuple(programs), process_group=None, timeout=120):
        for name, program in programs.items():
            torch.testing.assert_close(found[name], weights(Keeping(program).by_hand()), **TIGHT, msg=about(name))


def test_a_kept_gradient_stays_as_it_was_on_one_rank() -> None:
    for name, program in PROGRAMS.items():
        found = _trained("single_device", program, 1)
        torch.testing.assert_close(found, weights(Keeping(program).by_hand()), **TIGHT, msg=about(name))


ZERO = ("plain", "one parameter", "accumulated", "clipped", "manual")
"""The programs for an optimizer that is declared element-wise, which DeepSpeed's engine steps without a closure."""

STAGES: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"stage": stage}, precision) for stage in (1, 2, 3) for precision in ("32-true", "bf16-mixed")),
    *(({"stage": stage, "offload_optimizer": "cpu"}, "32-true") for stage in (1, 2, 3)),
)


def _every_stage() -> list[Tensor]:
    return [
        _trained(
            DeepSpeedStrategy(**options, config={"zero_allow_untested_optimizer": True}), PROGRAMS[name], 2, precision
        )
        for options, precision in STAGES
        for name in ZERO
    ]


def test_a_kept_gradient_stays_as_it_was_under_zero() -> None:
    # DeepSpeed writes every window's gradients into the same buffers with offloaded state and, in bf16, at stage 1.
    expected = {name: weights(Keeping(PROGRAMS[name]).by_hand()) for name in ZERO}
    cases = [(options, precision, name) for options, precision in STAGES for name in ZERO]
    for found in on_ranks(_every_stage, 2, process_group=None, timeout=300):
        for (options, precision, name), trained in zip(cases, found, strict=True):
            near = TIGHT if precision == "32-true" else {"atol": 4e-3, "rtol": 0}
            torch.testing.assert_close(trained, expected[name], **near, msg=about((options, precision, name)))
