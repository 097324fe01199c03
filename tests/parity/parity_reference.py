"""The reference: a hand-written loop in plain PyTorch, in one process, on the same global batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from parity_cases import SEED, Case
from parity_device import DEVICE
from parity_nets import Batch, Gan, Net, numbers
from parity_split import compute_in_two
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from drivetrain.data import order

Window = list[list[Batch]]
"""For each rank its micro-batches of one optimizer step; none where it has no data."""

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass
class Trace:
    """The compared values: one entry per window; ``steps`` and ``batches`` have one per micro-batch.

    Attributes:
        losses: the weighted mean over a window; NaN for a window without weight.
        norms: the norm of all gradients before clipping; infinite if one overflowed.
        rates: every group's learning rate in the step.
        scales: the loss scale after the step, if there is one.
        steps: optimizer steps made, after each micro-batch.
        batches: the indices of the samples of each global micro-batch.
        planned: the number of optimizer steps, as estimated before the run.
        weights: after the run.
        states: the state of each optimizer after the run, by parameter name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    planned: float = math.nan
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)


def reference(
    case: Case,
    world: int,
    precision: str = "32-true",
    by_rank: bool | None = None,
    in_two: bool = False,
    zero: int = 0,
) -> Trace:
    """Train ``case`` by hand as ``world`` ranks would.

    Args:
        case: the case.
        world: the number of ranks; it matters only if each rank has its own part.
        precision: a hand-written loop of the same precision.
        by_rank: compute each rank's micro-batches separately and average their gradients; otherwise every window is one
            big batch. None leaves it to the case.
        in_two: compute the layers that tensor parallelism splits in two parts, each of which is rounded separately.
        zero: compute as under that stage of ZeRO: a parameter without a gradient gets one of zeros; with autocast,
            computation uses half-precision parameters with float32 masters, and BatchNorm casts its weights; at stage 3
            a bias is added to a product that is already rounded.
    """
    by_rank = bool(case.by_rank) if by_rank is None else by_rank
    torch.manual_seed(SEED)
    net = case.net()
    if in_two:
        compute_in_two(net)
    net.to(DEVICE)
    dtype = DTYPES.get(precision)
    if dtype is not None:
        net.to(dtype)
    optimizers = case.optimize(net)
    schedulers = case.schedule(optimizers)
    trace = Trace()
    loop = Loop(case, net, optimizers, precision, trace, zero)
    planned = 0
    for epoch in range(case.epochs):
        for window in windows(case, world, epoch):
            planned += 1
            micro_batches = max(map(len, window))
            for position in range(micro_batches):
                rows = [rank[position][-1] for rank in window if position < len(rank) and len(rank[position][0])]
                trace.batches.append(torch.cat(rows).tolist())
            if dtype is not None:
                window = [[tuple(_cast(part, dtype) for part in batch) for batch in rank] for rank in window]
            if DEVICE != "cpu":
                window = [[tuple(part.to(DEVICE) for part in batch) for batch in rank] for rank in window]
            window = window if by_rank else [[_one(window)]]
            before = trace.steps[-1] if trace.steps else 0
            stepped = loop.window(window)
            if stepped:
                for scheduler, interval in schedulers:
                    if interval == "step":
                        scheduler.step()
            trace.steps += [before] * (micro_batches - 1) + [before + stepped]
        for scheduler, interval in schedulers:
            if interval == "epoch":
                scheduler.step()
    trace.planned = math.inf if case.own_parts else planned
    trace.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    trace.states = [
        {names[parameter]: dict(state) for parameter, state in optimizer.state.items()} for optimizer in optimizers
    ]
    return trace


class Loop:
    """Trains on windows."""

    def __init__(
        self, case: Case, net: Net, optimizers: list[Optimizer], precision: str, trace: Trace, zero: int = 0
    ) -> None:
        self.case = case
        self.net = net
        self.optimizers = optimizers
        self.autocast = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(DEVICE) if precision == "16-mixed" else None
        self.trace = trace
        self.zero = zero
        self.halves = copy.deepcopy(net) if zero and self.autocast is not None else None
        if self.halves is not None:
            for layer, trained in zip(self.halves.modules(), net.modules(), strict=True):
                layer._buffers = trained._buffers
                if isinstance(layer, nn.BatchNorm1d):
                    layer.forward = partial(_normed_in_float32, layer)  # type: ignore[method-assign]
                if isinstance(layer, nn.Linear) and zero == 3:
                    layer.forward = partial(_bias_at_last, layer)  # type: ignore[method-assign]

    def window(self, window: Window) -> bool:
        """Train on a window; returns whether a step was made."""
        trace = self.trace
        if isinstance(self.net, Gan):
            return self.turns(self.net, window[0][0])
        if sum(self.net.weight(batch) for rank in window for batch in rank) == 0:
            trace.losses.append(math.nan)
            trace.scales += trace.scales[-1:]
            return False
        loss = self.backward(window)
        trace.losses.append(float(loss))
        if isinstance(self.optimizers[0], LBFGS):
            self.note(self.optimizers)
            self.optimizers[0].step(self.closure(window, loss))
            return True
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self.note(self.optimizers)
        if self.case.clip is not None:
            self.clip(*self.case.clip)
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
            return True
        before = self.scaler.get_scale()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        trace.scales.append(self.scaler.get_scale())
        return self.scaler.get_scale() >= before

    def backward(self, window: Window) -> Tensor:
        """Accumulate the window's gradient in the parameters; returns its loss."""
        ranks = len(window)
        total = sum(self.net.weight(batch) for rank in window for batch in rank)
        parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        mean = torch.zeros((), dtype=torch.float64)
        gradients: list[Tensor | None] = [None] * len(parameters)
        buffers = list(self.net.buffers())
        of_rank_0: list[Tensor] = []
        for number, rank in enumerate(window):
            self.net.zero_grad()
            for batch in rank:
                weight = self.net.weight(batch)
                if weight == 0:
                    continue
                with self.context():
                    loss = self.computing().loss(batch)
                mean = mean + loss.detach().double() * (weight / total)
                loss = loss * (ranks * weight / total)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                self.collect()
            for position, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    share = parameter.grad / ranks
                    held = gradients[position]
                    gradients[position] = share if held is None else held + share
            if number == 0:
                of_rank_0 = [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, of_rank_0, strict=True):
            buffer.copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None and self.zero else gradient
        return mean

    def computing(self) -> Net:
        """The network that runs: the trained one, or its parameters in half precision."""
        if self.halves is None:
            return self.net
        for half, master in zip(self.halves.parameters(), self.net.parameters(), strict=True):
            half.data = master.data.to(self.autocast)
        return self.halves

    def collect(self) -> None:
        """Add the gradients of the running network to those of the masters: rounded gradients are not rounded again."""
        if self.halves is None:
            return
        for half, master in zip(self.halves.parameters(), self.net.parameters(), strict=True):
            if half.grad is not None:
                gradient, half.grad = half.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad + gradient

    def closure(self, window: Window, loss: Tensor) -> Any:
        evaluated = [loss.float()]

        def evaluate() -> Tensor:
            return evaluated.pop() if evaluated else self.backward(window).float()

        return evaluate

    def turns(self, net: Gan, batch: Batch) -> bool:
        """Do one round of a GAN, with the discriminator first."""
        generator, discriminator = self.optimizers
        losses = []
        for optimizer, play in ((discriminator, net.discriminator_loss), (generator, net.generator_loss)):
            net.zero_grad()
            loss = play(batch)
            loss.backward()
            self.note([optimizer])
            optimizer.step()
            losses.append(loss.detach())
        self.trace.losses.append(float(sum(losses)))
        return True

    def note(self, optimizers: list[Optimizer]) -> None:
        gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in _gradients(optimizers)]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self.trace.norms.append(norm if math.isfinite(norm) else math.inf)
        self.trace.rates.append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])

    def clip(self, value: float, algorithm: str) -> None:
        parameters = [parameter for parameter in self.net.parameters() if parameter.grad is not None]
        if algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, value)
        # torch's function does not support sparse gradients
        elif any(one.grad is not None and one.grad.is_sparse for one in parameters):
            coefficient = value / (self.trace.norms[-1] + 1e-6)
            for gradient in _gradients(self.optimizers):
                gradient.mul_(min(1.0, coefficient))
        else:
            torch.nn.utils.clip_grad_norm_(parameters, value)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(DEVICE, self.autocast)


def _bias_at_last(layer: nn.Linear, x: Tensor) -> Tensor:
    """DeepSpeed's linear layer at stage 3, which keeps no gathered weight for the backward."""
    if layer.bias is None or x.dim() == 2:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight) + layer.bias


def _normed_in_float32(layer: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """BatchNorm whose weights are rounded to half precision; they and its statistics are used in float32."""
    assert layer.num_batches_tracked is not None
    if layer.training:
        layer.num_batches_tracked += 1
    weight, bias = layer.weight.float(), layer.bias.float()
    return nn.functional.batch_norm(
        x, layer.running_mean, layer.running_var, weight, bias, layer.training, layer.momentum or 0.0, layer.eps
    )


def windows(case: Case, world: int, epoch: int) -> Iterator[Window]:
    """Yield an epoch's windows, each rank's micro-batches for itself."""
    micro_batches = streamed(case, world) if case.own_parts else dealt(case, world, epoch)
    for start in range(0, len(micro_batches), case.accumulate):
        taken = micro_batches[start : start + case.accumulate]
        yield [[micro[rank] for micro in taken] for rank in range(world)]


def dealt(case: Case, world: int, epoch: int) -> list[list[Batch]]:
    """Yield the epoch's global micro-batches, each cut into contiguous parts, one for each rank (api.md: Dealing)."""
    data = case.data()
    samples = len(data[0])
    indices = order(samples, SEED, epoch)(torch.arange(samples))
    # Equal parts of a full one; parts of the last one differ by at most one sample, larger ones on lower ranks.
    return [
        [tuple(part[chosen] for part in data) for chosen in torch.tensor_split(whole, world)]
        for whole in indices.split(case.batch)
    ]


def streamed(case: Case, world: int) -> list[list[Batch]]:
    """Yield the micro-batches of streams that belong to each rank."""
    parts = [list(stream(case, rank)) for rank in range(world)]
    nothing = tuple(part[:0] for part in parts[0][0])
    return [
        [part[position] if position < len(part) else nothing for part in parts]
        for position in range(max(map(len, parts)))
    ]


def stream(case: Case, rank: int) -> Iterator[Batch]:
    """Yield the batches that rank ``rank`` reads."""
    data, start = numbers(200), 50 * rank
    for size in case.own_parts[rank]:
        yield tuple(part[start : start + size] for part in data)
        start += size


def _one(window: Window) -> Batch:
    """Return a whole window as one batch, in the order of micro-batches and ranks."""
    batches = [rank[position] for position in range(max(map(len, window))) for rank in window if position < len(rank)]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _gradients(optimizers: list[Optimizer]) -> list[Tensor]:
    found = []
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad)
    return found
