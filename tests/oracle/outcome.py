"""The results of a program, as computed by the loop and as observed on a rank of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from oracle.data_loaders import numbers
from oracle.nets import Model
from oracle.program import Log

LARGE = 2**24 + 1
"""The first integer that float32 cannot hold."""


@dataclass
class Evaluated:
    loss: float = math.nan  # the mean over samples; nan if the checkpoint was only loaded
    weights: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers that were evaluated
    refused: bool = False  # the checkpoint does not have what was asked for
    text: str = ""  # the error's message


@dataclass
class Outcome:
    weights: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers after the run, by name
    states: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)  # of optimizers, by parameter and key
    rates: list[list[float]] = field(default_factory=list)  # all groups' learning rates, at every optimizer step
    schedulers: list[dict[str, Any]] = field(default_factory=list)  # of each its count of steps and its learning rates
    flushes: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # to loggers: the step, values by key
    metrics: dict[str, float] = field(default_factory=dict)  # ``callback_metrics`` as training ended
    counts: dict[str, int] = field(default_factory=dict)  # of steps, epochs, micro-batches and samples
    # of every micro-batch of a rank, in order: its epoch and the indices of the samples; none for a joiner
    samples: list[tuple[int, list[int]]] = field(default_factory=list)
    samples_of_ranks: list[tuple[int, list[list[int]]]] = field(default_factory=list)  # from the interpreter
    norms: list[float] = field(default_factory=list)  # by micro-batch: of gradients before the last clipping; or nan
    scales: list[float] = field(default_factory=list)  # in fp16, the loss scale after each micro-batch
    losses: list[float] = field(default_factory=list)  # of every micro-batch of a rank; nan for none, or a joiner
    losses_of_ranks: list[list[float]] = field(default_factory=list)  # the same for all ranks, from the interpreter
    step_norms: list[float] = field(default_factory=list)  # of gradients before every step, infinite for an overflow
    planned: float = math.nan  # the number of optimizer steps, as estimated before the run
    hooks: list[str] = field(default_factory=list)  # the hooks in the order in which they were called
    steps: list[tuple[int, Tensor]] = field(default_factory=list)  # by micro-batch: steps made, weights in one vector
    saved_after: int = -1  # micro-batches trained on when the checkpoint was written; -1 for no checkpoint
    saved_at_end: bool = False  # the run was over by then
    saved_hooks: int = 0  # hooks called until then
    saved_rates: int = 0  # entries of ``rates`` until then
    saved_flushes: int = 0  # entries of ``flushes`` until then
    error: str = ""  # the type of what was raised, or ""
    text: str = ""  # the error's message
    refused: bool = False  # the resume must be refused, because of its optimizer; all else is that of the saved run
    evaluated: Evaluated | None = None  # what an evaluation of the checkpoint gives; None without one


def key_of(log: Log, number: int) -> str:
    return f"{log.what}_{number}"


def value_of(log: Log, net: Model, loss: Tensor | None, at: int, call: Any = None) -> Any:
    """Return the value to log, exactly as user code would pass it. ``call`` runs a forward of the module."""
    if log.what == "forward":
        return forward_loss(net, net if call is None else call)
    if log.what == "loss":
        return loss
    if log.what == "number":
        return 0.25 * at + 0.1
    if log.what == "numpy":
        return numpy.float32(0.5 * at)
    if log.what == "large":
        return LARGE + 2 * at
    return net.scale if log.what == "parameter" else net.drift


def forward_loss(net: Model, call: Any) -> Tensor:
    """Return the loss of fixed samples in eval mode."""
    x, y, _ = numbers(3, net.on_tokens)
    dtype = next(one.dtype for one in net.parameters())
    trained = net.training
    net.eval()
    with torch.no_grad():
        output = call(x if net.on_tokens else x.to(dtype))
        loss = net.loss_of(output, y if net.on_tokens else y.to(dtype))
    net.train(trained)
    return loss


def whole(value: Any) -> Tensor:
    """Return a number, or a tensor that may be sharded over ranks, as a local tensor."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
    value = value.detach()
    return value.clone() if value.is_meta else value.cpu().clone()  # ZeRO 3 leaves meta tensors after an error


def numbers_in(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return a parameter's state without entries that are not numbers."""
    kinds = (int, float, Tensor)
    return {key: whole(one) for key, one in state.items() if isinstance(one, kinds) or hasattr(one, "full_tensor")}


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    return {"steps": scheduler.last_epoch, "rates": [float(rate) for rate in scheduler.get_last_lr()]}
