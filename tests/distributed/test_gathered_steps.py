"""Optimizers whose update is not element-wise: their step sees whole parameters, gradients and state. B-17, S-07."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from phased_training import state
from small_runs import (
    Regression,
    Saver,
    about,
    assert_near,
    each,
    global_batches,
    loader,
    quiet,
    refusal,
    seeded,
    train_by_hand,
)
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Adafactor, AdamW, Optimizer

from captured_warnings import captured_warnings
from drivetrain import Strategy, TrainModule
from drivetrain.callbacks import LambdaCallback
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from oracle import program as plan
from oracle.check import check
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH = 32, 8


class Lamb(AdamW):
    """AdamW with the trust ratios of LAMB (https://arxiv.org/abs/1904.00962). Torch knows only its base class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["params"][0].tag == "first"  # parameters keep their attributes
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        super().step(closure)
        for parameter, old in zip(parameters, before, strict=True):
            ratio = old.norm().item() / max((parameter - old).norm().item(), 1e-3)
            parameter.copy_(torch.lerp(old, parameter, min(ratio, 3.0)))


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


class Rows(Optimizer):
    """Element-wise, with a momentum. Notes how many elements it saw, and of which class; writes ``data``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: set[tuple[int, str]] = set()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.seen.add((parameter.numel(), type(parameter.data).__name__))
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.5).add_(parameter.grad)
                parameter.data = parameter.data - group["lr"] * momentum


def _lamb(module: Any) -> Optimizer:
    first, *others = module.net
    rest = [parameter for layer in others for parameter in layer.parameters()]
    groups: list[dict[str, Any]] = [{"params": list(first.parameters())}, {"params": rest, "lr": 0.02}]
    return Lamb(groups, lr=0.05, eps=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "lamb": _lamb,
    "shampoo": lambda module: Shampoo(module.parameters()),
    "adafactor": lambda module: Adafactor(module.parameters(), lr=0.05),
    "rows": lambda module: Rows(module.parameters()),
    "AdamW": lambda module: AdamW(module.parameters()),
}
NAMES = ["lamb", "shampoo", "adafactor"]


class Module(Regression):
    """Its rows do not divide by the ranks; ``declared`` is ``elementwise``; two layers may be tensor-parallel."""

    def __init__(self, name: str, declared: Any = None, width: int = 7, split: bool = False) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3), nn.Linear(3, 1)))
        self.name, self.declared, self.split = name, declared, split

    def configure_model(self) -> None:
        if self.split:
            mesh = self.device_mesh["tensor"]
            parallelize_module(self, mesh, {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()})

    def configure_optimizers(self) -> Any:
        weight: Any = self.net[0].weight
        weight.tag = "first"
        self.optimizer = OPTIMIZERS[self.name](self)
        return self.optimizer if self.declared is None else {"optimizer": self.optimizer, "elementwise": self.declared}


def _by_hand(name: str, epochs: int = 1, window: int = 1, width: int = 7) -> dict[str, Tensor]:
    batches = global_batches(SAMPLES, BATCH)
    return state(train_by_hand(Module(name, width=width), batches, window, epochs=epochs))


STRATEGIES: dict[str, Callable[[], Strategy | str]] = {
    "full": FSDPStrategy,
    "grad_op": lambda: FSDPStrategy(sharding="grad_op"),
    "ignored": lambda: FSDPStrategy(ignored=["net.2.*"]),
    "ddp": lambda: "ddp",
    "hybrid": lambda: FSDPStrategy(sharding="hybrid", replicate_size=2, shard_size=2),
    "tensor parallel": lambda: FSDPStrategy(tensor_parallel=2),
    "zero 2": lambda: DeepSpeedStrategy(stage=2),
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0, sub_group_size=20),
}


def _train(module: TrainModule, strategy: str, path: str | None = None, **settings: Any) -> dict[str, Tensor]:
    data_ranks = 4 if strategy == "hybrid" else 2
    fit = quiet(strategy=STRATEGIES[strategy](), **settings)
    fit.fit(module, loader(SAMPLES, BATCH // data_ranks), ckpt_path=path)
    return state(module)


def _train_twice(name: str, window: int, width: int, first: str, second: str, path: str) -> dict[str, Tensor]:
    """Train, and resume under a second strategy if one is given."""
    split = first == "tensor parallel"
    callbacks = [Saver(path)] if second else []
    trained = _train(Module(name, None, width, split), first, callbacks=callbacks, accumulate_grad_batches=window)
    if not second:
        return trained
    return _train(Module(name, None, width), second, path, max_epochs=2, accumulate_grad_batches=window)


@pytest.mark.parametrize(
    ("ranks", "first", "second"),
    [
        *[(2, strategy, "") for strategy in ("full", "grad_op", "ignored")],
        *[(4, mesh, "") for mesh in ("hybrid", "tensor parallel")],
        *[(2, "full", "full"), (2, "full", "ddp"), (2, "ddp", "grad_op")],
    ],
)
def test_a_step_on_shards_equals_one_process_and_resumes(ranks: int, first: str, second: str, tmp_path: Path) -> None:
    # B-17, S-07
    windows = [*((name, 1) for name in NAMES), ("lamb", 2)]
    width = 7 if ranks == 2 else 8  # split layers must divide by the group's size
    cases = [(name, window, width, first, second, str(tmp_path / f"{name}{window}")) for name, window in windows]
    for found in on_ranks(each, ranks, _train_twice, *cases, timeout=240):
        for (name, window), trained in zip(windows, found, strict=True):
            for key, value in _by_hand(name, 2 if second else 1, window, width).items():
                torch.testing.assert_close(trained[key], value, atol=1e-5, rtol=1e-5, msg=about((name, window, key)))


@pytest.mark.parametrize(
    "optimizers",
    [
        pytest.param((plan.Optimizer("sam"),), id="sam"),
        pytest.param((plan.Optimizer("lbfgs"),), id="lbfgs"),
        pytest.param((plan.Optimizer("muon", of="matrices"), plan.Optimizer("adamw", of="vectors")), id="muon, AdamW"),
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_grad_op"])
def test_a_step_on_shards_equals_the_plain_loop(strategy: str, optimizers: Any) -> None:  # B-17, S-07
    program = plan.Program(strategy, 2, data=plan.Data(samples=16), optimizers=optimizers)
    assert not check(program)
    assert not check(replace(program, accumulate=2, clip=0.3))


def _elements_of_state() -> int:
    """Return the number of elements for which this rank's momenta take memory, after the last step."""
    sizes: list[int] = []

    def note(trainer: Any, *_: Any) -> None:
        for values in trainer.strategy.optimizer_state()["state"].values():
            part = trainer.strategy.shard_of(values["exp_avg"])
            sizes.append(part.local.untyped_storage().nbytes() // 4)

    _train(Module("lamb"), "full", callbacks=[LambdaCallback(on_train_end=note)])
    return sum(sizes)


def test_state_is_sharded_between_steps() -> None:  # B-17
    assert sum(on_ranks(_elements_of_state, 2)) == sum(parameter.numel() for parameter in Module("lamb").parameters())


def _declared(strategy: str, declared: bool) -> tuple[set[tuple[int, str]], dict[str, Tensor], list[str]]:
    module = Module("rows", declared)
    with captured_warnings(logging.INFO) as lines:
        trained = _train(module, strategy)
    return module.optimizer.seen, trained, [line for line in lines if "element-wise" in line]


# Where ZeRO refuses an optimizer that is not element-wise: see test_deepspeed_runs.py.
@pytest.mark.parametrize(
    ("strategy", "declared"),
    [("full", False), ("ignored", False), *[(strategy, True) for strategy in ("full", "ignored", "zero 2", "zero 3")]],
)
def test_only_a_declared_optimizer_steps_plain_shards(strategy: str, declared: bool) -> None:  # B-17
    whole = {(parameter.numel(), "Tensor") for parameter in Module("rows").parameters()}
    for rank, (seen, trained, lines) in enumerate(on_ranks(_declared, 2, strategy, declared)):
        assert (seen != whole) == declared
        assert {kind for _, kind in seen} == {"Tensor"}
        assert len(lines) == (rank == 0 and not declared)
        assert_near(trained, _by_hand("rows"), rtol=1e-5)


class Unfreezing(Module):
    """The last layer trains from the start of the run on, in a group that is added then."""

    def configure_optimizers(self) -> Any:
        self.net[3].requires_grad_(False)
        self.net[0].weight.tag = "first"
        return Lamb([parameter for parameter in self.parameters() if parameter.requires_grad])

    def on_train_start(self) -> None:
        self.net[3].requires_grad_(True)
        self.trainer.optimizers[0].add_param_group({"params": list(self.net[3].parameters())})


def _with_limit(module: Module, limit: int) -> str:
    return refusal(module, loader(SAMPLES, BATCH // 2), strategy=FSDPStrategy(gather_limit=limit))


def test_parameters_above_the_limit_are_refused_with_both_ways_out() -> None:  # B-17
    nbytes = 4 * sum(parameter.numel() for parameter in Module("lamb").parameters())
    for text, allowed in on_ranks(each, 2, _with_limit, (Module("lamb"), nbytes - 1), (Module("AdamW"), nbytes - 1)):
        assert text.startswith("ConfigurationError: Lamb holds 252 bytes of sharded parameters"), text
        assert "gather_limit=251" in text
        assert "'elementwise': True" in text
        assert "raise FSDPStrategy(gather_limit=...)" in text
        assert allowed.startswith("nothing was raised")


def test_a_group_that_is_added_within_a_run_counts_towards_the_limit() -> None:  # B-17
    for text in on_ranks(_with_limit, 2, Unfreezing("lamb"), 251):
        assert text.startswith("ConfigurationError: Lamb holds 252 bytes of sharded parameters"), text
