"""User code of a program: optimizers and schedulers in plain PyTorch, used by both the loop and the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from oracle.nets import Model, part_of
from oracle.program import Optimizer, Program, Scheduler


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as commonly implemented: its step requires a closure."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        loss = torch.enable_grad()(closure)()
        held = [(one, group) for group in self.param_groups for one in group["params"] if one.grad is not None]
        first = [one.grad for one, _ in held]
        norm = torch.stack([gradient.norm() for gradient in first]).norm()
        climbed = [gradient * (0.05 / (norm + 1e-12)) for gradient in first]
        for (one, _), step in zip(held, climbed, strict=True):
            one.add_(step)
        torch.enable_grad()(closure)()
        for (one, group), step, gradient in zip(held, climbed, first, strict=True):
            one.sub_(step)
            one.sub_(self.direction(gradient, one.grad), alpha=group["lr"])
        return loss

    def direction(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return second


class SamSum(Sam):
    """A variant that adds the gradient at the second point to the one at the first, to which it kept a reference."""

    def direction(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (first + second) / 2


class Optimistic(torch.optim.Optimizer):
    """Optimistic gradient descent: along ``2 * gradient - the previous gradient``, to which it keeps a reference."""

    def __init__(self, parameters: Iterable[Any], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.move(one, one.grad, group)
        return loss

    def move(self, one: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        before = self.state[one].get("before", gradient)
        one.mul_(1 - group["lr"] * group["weight_decay"])
        one.sub_(2 * gradient - before, alpha=group["lr"])
        self.state[one]["before"] = gradient


class Heun(Optimistic):
    """Heun's method: every other step goes back and along the mean of two gradients; it kept the first of them."""

    def move(self, one: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        first = self.state[one].pop("first", None)
        if first is None:
            one.sub_(gradient, alpha=group["lr"])
            self.state[one]["first"] = gradient
            return
        one.add_(first - gradient, alpha=group["lr"] / 2)
        one.mul_(1 - group["lr"] * group["weight_decay"])


def make_optimizer(net: Model, program: Program, plan: Optimizer) -> torch.optim.Optimizer:
    """Build an optimizer over its part, with what is frozen if that is trained later without a group of its own."""
    later = any(change.what == "unfreeze" for change in program.changes)
    exact = program.precision in ("32-true", "64-true")
    holds_frozen = later or plan.holds_frozen
    return optimizer_over([one for one in part_of(net, plan.of) if holds_frozen or one.requires_grad], plan, exact)


def optimizer_over(parameters: list[nn.Parameter], plan: Optimizer, exact: bool) -> torch.optim.Optimizer:
    """Build an optimizer over ``parameters``; ``exact``: gradients are at least in float32 precision."""
    own: dict[str, Any] = {} if plan.weight_decay is None else {"weight_decay": plan.weight_decay}
    if plan.kind == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=plan.lr, max_iter=2, history_size=3)
    if plan.kind == "line_search":
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
    if plan.kind == "muon":
        return torch.optim.Muon(parameters, lr=plan.lr)
    if plan.kind == "adamw":
        # The default eps amplifies rounding in gradients that are nearly zero. The gradient of the key's bias in
        # attention consists of rounding errors only, because softmax cancels it.
        own = {"weight_decay": 0.1, **own}
        groups = in_groups(parameters, plan, 0.1 * plan.lr)
        if plan.split and plan.weight_decay is None and len(groups) == 2 and isinstance(groups[1], dict):
            groups[1]["weight_decay"] = 0.0
        if plan.fused:
            own["fused"] = True
        eps = plan.eps or (1e-4 if exact else 1e-2)
        return AdamW(groups, lr=0.1 * plan.lr, eps=eps, amsgrad=plan.amsgrad, **own)
    groups = in_groups(parameters, plan, plan.lr)
    if plan.kind in ("sam", "sam_sum"):
        return (Sam if plan.kind == "sam" else SamSum)(groups, plan.lr)
    if plan.kind in ("optimistic", "heun"):
        return (Optimistic if plan.kind == "optimistic" else Heun)(groups, plan.lr, **own)
    return SGD(groups, lr=plan.lr, momentum=0.9 if plan.kind == "momentum" else 0.0, **own)


def in_groups(parameters: list[nn.Parameter], plan: Optimizer, lr: float) -> list[Any]:
    """Return the parameters, or the two groups of them that the plan, or an attribute of a parameter, asks for."""
    slow = [one.ndim <= 1 if plan.split else getattr(one, "slow", False) for one in parameters]
    if all(slow) or not any(slow):
        return parameters
    first, second = (
        [one for one, is_slow in zip(parameters, slow, strict=True) if is_slow == at] for at in (False, True)
    )
    return [{"params": first}, {"params": second, "lr": lr / 2}]


def make_scheduler(optimizer: torch.optim.Optimizer, plan: Scheduler, steps: float) -> Any:
    """Build a scheduler; "linear" decays over ``steps`` steps."""
    if plan.kind == "linear":
        return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    if plan.kind == "warmup":
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    if plan.kind == "plateau":
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return StepLR(optimizer, step_size=1, gamma=0.5)
