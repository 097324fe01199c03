"""Optimizers whose update is not element-wise: their step sees whole parameters, gradients and state. B-17, S-07."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_runs import global_batches, loader, quiet, seeded
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Optimizer

from drivetrain import Strategy, TrainModule
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 48, 8
SPREAD: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}

# Optimizers


class Lamb(Optimizer):
    """LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962). Its trust ratios are numbers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:  # created in the first step
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(parameter.grad, parameter.grad, value=0.01)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-3) + 0.1 * parameter
                ratio = parameter.norm().item() / update.norm().item()
                parameter.add_(update, alpha=-group["lr"] * ratio)


class TrustedAdamW(AdamW):
    """AdamW, whose update is scaled by a trust ratio. Torch knows its class only as a base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        loss = super().step(closure)
        for parameter, old in zip(parameters, before, strict=True):
            ratio = float(old.norm()) / max(float((parameter - old).norm()), 1e-3)
            parameter.copy_(torch.lerp(old, parameter, min(ratio, 3.0)))
        return loss


class Sam(Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021, https://arxiv.org/abs/2010.01412), as most people write it.

    An inner optimizer shares the groups, and the weights are restored through ``data``.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is required"
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm().item()
        old = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=0.3 / norm)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for parameter, value in zip(parameters, old, strict=True):
            parameter.data = value
        self.inner.step()


class Shampoo(Optimizer):
    """Shampoo (Gupta et al. 2018, https://arxiv.org/abs/1802.09568): its state is not shaped like its parameters."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.view(len(parameter), -1)
                state = self.state[parameter]
                if not state:
                    state["left"] = 0.1 * torch.eye(len(gradient))
                    state["history"] = [torch.zeros_like(parameter)]
                state["left"] += gradient @ gradient.T
                values, vectors = torch.linalg.eigh(state["left"])
                direction = vectors @ torch.diag(values.rsqrt()) @ vectors.T @ gradient
                state["history"][0].mul_(0.5).add_(direction.view_as(parameter))
                parameter.sub_(state["history"][0], alpha=group["lr"])


class GlobalRate(Optimizer):
    """Its rate depends on all gradients of all groups, as that of Prodigy and D-Adaptation does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = sum(parameter.grad.abs().sum().item() for parameter in self.parameters)
        for group in self.param_groups:
            group["d"] = max(0.9 * group["d"], 1 / (1 + total))
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])


def _muon(module: nn.Module) -> list[Optimizer]:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in module.parameters() if parameter.dim() != 2]
    return [Muon(matrices, lr=0.05), AdamW(rest, lr=0.05)]


def _two_groups(kind: type[Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """Build an optimizer of two parameter groups with different rates."""

    def build(module: Any) -> Optimizer:
        first, *others = module.net
        rest = [parameter for layer in others for parameter in layer.parameters()]
        return kind([{"params": list(first.parameters())}, {"params": rest, "lr": 0.02}])  # type: ignore[call-arg]

    return build


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "lamb": _two_groups(Lamb),
    "trusted AdamW": lambda module: TrustedAdamW(module.parameters(), lr=0.05, eps=1e-4),
    "sam": lambda module: Sam(module.parameters()),
    "shampoo": lambda module: Shampoo(module.parameters()),
    "global rate": _two_groups(GlobalRate),
    "adafactor": lambda module: Adafactor(module.parameters(), lr=0.05),
    "lbfgs": lambda module: LBFGS(module.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}
CLOSURES = ("sam", "lbfgs")
MANUAL = ("lamb", "sam", "lbfgs")


class Module(TrainModule):
    """A network of odd sizes, whose rows do not divide by the number of ranks."""

    def __init__(self, name: str, manual: bool = False) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1)))
        self.name = name
        self.automatic_optimization = not manual

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        self.train_on(batch, self.optimizers(), self.manual_backward)
        return None

    def train_on(self, batch: Any, optimizer: Any, backward: Callable[[Tensor], Any]) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            backward(loss)
            return loss

        if self.name in CLOSURES:
            if self.name == "sam":  # it uses the gradients before it calls the closure
                closure()
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.name](self)
        closure = self.automatic_optimization and self.name in CLOSURES
        return {"optimizer": optimizer, "closure": True} if closure else optimizer


def _by_hand(name: str, epochs: int = 1, window: int = 1, max_norm: float | None = None) -> dict[str, Tensor]:
    """Train in a loop of one process."""
    module = Module(name)
    optimizer = OPTIMIZERS[name](module)
    batches = global_batches(SAMPLES, BATCH) * epochs
    for start in range(0, len(batches), window):
        parts = batches[start : start + window]

        def closure(parts: Any = parts) -> Tensor:
            optimizer.zero_grad()
            losses = [module.loss(part) / len(parts) for part in parts]
            for loss in losses:
                loss.backward()  # type: ignore[no-untyped-call]
            if max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            return sum(losses)  # type: ignore[return-value]

        if name != "lbfgs":
            closure()
        optimizer.step(closure) if name in CLOSURES else optimizer.step()
    return _weights(module)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


FSDP: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: "ddp",
    "full": FSDPStrategy,
    "grad_op": lambda: FSDPStrategy(sharding="grad_op"),
    "ignored": lambda: FSDPStrategy(ignored=["net.2.*"]),
}
ZERO: dict[str, Callable[[], Strategy]] = {
    "zero 1": lambda: DeepSpeedStrategy(stage=1),
    "zero 2": lambda: DeepSpeedStrategy(stage=2),
    "zero 2, offloaded": lambda: DeepSpeedStrategy(stage=2, offload_optimizer="cpu"),
    "zero 3": lambda: DeepSpeedStrategy(**SPREAD, sub_group_size=20),
    "zero 3, persistent": lambda: DeepSpeedStrategy(stage=3),
}
STRATEGIES = {**FSDP, **ZERO}


def _trained(strategy: str, names: tuple[str, ...], ranks: int, manual: bool, **settings: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        module = Module(name, manual)
        quiet(strategy=STRATEGIES[strategy](), **settings).fit(module, loader(SAMPLES, BATCH // ranks))
        found[name] = _weights(module)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_on_shards_equals_one_process(strategy: str) -> None:  # B-17, S-07
    for found in on_ranks(_trained, 2, strategy, tuple(OPTIMIZERS), 2, False, timeout=240):
        for name, weights in found.items():
            hand = _by_hand(name)
            print(strategy, name, max(float((weights[k] - hand[k]).abs().max()) for k in hand))
