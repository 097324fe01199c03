"""A module whose layers are frozen, unfrozen and added to the optimizer during the run, and the loop by hand."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from small_runs import FEATURES, global_batches, loader, quiet, seeded
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from drivetrain import TrainModule

SAMPLES, GLOBAL, EPOCHS = 24, 8, 3
"""Three steps an epoch, of the same samples under any number of ranks."""

Turns = dict[tuple[str, int], str]
"""What is done at a place (a hook's name) at a step (there, the number of steps made): "+body", "-head", "body"
(into the optimizer, as a group of its own), "new" (a layer is created); several with spaces between."""


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.neck = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.neck(torch.tanh(self.body(x)))))
        return out


class Phased(TrainModule):
    """Makes ``turns``, on one rank or all; starts with ``frozen`` layers; its optimizer gets those ``held``, or all."""

    def __init__(
        self,
        turns: Turns,
        frozen: str = "body",
        held: str | None = None,
        only_on: int | None = None,
        split: bool = False,
        manual: bool = False,
    ) -> None:
        super().__init__()
        self.turns, self.held, self.only_on, self.split = turns, held, only_on, split
        self.automatic_optimization = not manual
        self.net = seeded(Stack)
        for name in frozen.split():
            self.net.get_submodule(name).requires_grad_(False)

    def configure_model(self) -> None:
        if self.split:
            mesh = self.trainer.strategy.device_mesh["tensor"]
            parallelize_module(self.net, mesh, {"body": ColwiseParallel(), "neck": RowwiseParallel()})

    def configure_optimizers(self) -> Any:
        layers = [self.net] if self.held is None else [self.net.get_submodule(name) for name in self.held.split()]
        parameters = [one for layer in layers for one in layer.parameters()]
        # Fused: half the time under FSDP. It does not support whole parameters and shards together.
        fused = len({isinstance(one, DTensor) for one in parameters}) == 1
        return torch.optim.AdamW(parameters, lr=0.02, eps=1e-5, weight_decay=0.1, fused=fused)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.take("training_step", self.global_step)
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def take(self, place: str, step: int, optimizer: Any = None) -> None:
        if self.only_on is not None and self.global_rank != self.only_on:
            return
        for turn in self.turns.get((place, step), "").split():
            self.turn(turn, optimizer)

    def turn(self, turn: str, optimizer: Any) -> None:
        if turn == "new":
            self.net.head = nn.Linear(8, 1)
            self.net.head.requires_grad_(True)
        elif turn[0] in "+-":
            self.net.get_submodule(turn[1:]).requires_grad_(turn[0] == "+")
        else:
            optimizer = self.optimizers() if optimizer is None else optimizer
            optimizer.add_param_group({"params": self.net.get_submodule(turn).parameters(), "lr": 0.01})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def _take_in_hook(place: str) -> Any:
    return lambda self, *arguments: self.take(place, self.global_step)


for _hook in (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
):
    setattr(Phased, _hook, _take_in_hook(_hook))


def by_hand(module: Phased) -> dict[str, torch.Tensor]:
    """Written by hand: programs of the oracle neither replace layers nor make changes in all of these hooks."""
    optimizer = module.configure_optimizers()
    batches = global_batches(SAMPLES, GLOBAL)
    step = 0
    for place in ("on_fit_start", "on_train_start"):
        module.take(place, step, optimizer)
    for _ in range(EPOCHS):
        module.take("on_train_epoch_start", step, optimizer)
        for batch in batches:
            for place in ("on_train_batch_start", "on_before_zero_grad"):
                module.take(place, step, optimizer)
            optimizer.zero_grad()
            module.take("training_step", step, optimizer)
            loss = module.loss(batch)
            module.take("on_before_backward", step, optimizer)
            loss.backward()
            for place in ("on_after_backward", "on_before_optimizer_step"):
                module.take(place, step, optimizer)
            optimizer.step()
            step += 1
            module.take("on_train_batch_end", step, optimizer)
        for place in ("on_validation_epoch_end", "on_train_epoch_end"):
            module.take(place, step, optimizer)
    return state(module)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def data_ranks(options: dict[str, Any]) -> int:
    """Return the number of ranks over which a strategy with these options splits the data."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return ranks // int(options.get("tensor_parallel", 1))


def train(module: Phased, strategy: Any, ranks: int, resume: str | None = None, **settings: Any) -> Any:
    """Train on this rank's share, or resume from a checkpoint; returns the `Fit`."""
    fit = quiet(strategy=strategy, max_epochs=EPOCHS, **settings)
    validation = loader(4, 2) if any(place.startswith("on_validation") for place, _ in module.turns) else None
    fit.fit(module, loader(SAMPLES, GLOBAL // ranks), validation, ckpt_path=resume)
    return fit
