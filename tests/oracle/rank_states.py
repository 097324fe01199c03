"""The ranks of a program in one process: each has its own buffers, random generator and gradients, and a turn.

Weights and optimizers are common to all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oracle.data_loaders import samples_of
from oracle.dealing import GlobalBatch, estimated_steps
from oracle.logged_values import LoggedValues
from oracle.nets import DEVICE, Model, Parts, compute_in_two, seeded_model
from oracle.optimizers import make_optimizer, make_scheduler
from oracle.outcome import Outcome
from oracle.program import OWN_PARTS, Data, Program

DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass
class Rank:
    buffers: dict[str, Tensor]
    generator: Tensor
    gradients: list[Tensor | None] = field(default_factory=list)
    last: Any = None  # the previous micro-batch, used for joining if the data is the rank's own part


@dataclass
class MicroBatch:
    """A global micro-batch: of each rank its samples, its tensors, whether it only joins with them, and its weight."""

    samples: GlobalBatch
    parts: list[Parts]
    joins: list[bool]
    weights: list[float]


class RankStates:
    """The network and optimizers of a run, and the state of every rank."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.validation: Any = program.validation
        self.world = program.ranks
        self.strategy = program.strategy
        self.net = seeded_model(program).to(DEVICE)
        if program.tensor_parallel > 1 and program.precision not in ("32-true", "64-true"):
            compute_in_two(self.net)  # each part of a split layer is rounded separately
        if program.precision in DTYPES:
            self.net.to(DTYPES[program.precision])
        self.parameters = list(self.net.parameters())
        self.optimizers = [make_optimizer(self.net, program, plan) for plan in program.optimizers]
        steps = estimated_steps(program, self.world)
        self.schedulers = [(make_scheduler(self.optimizers[0], plan, steps), plan) for plan in program.schedulers]
        self.ranks = [self.new_rank(rank, 1000) for rank in range(self.world)]
        self.scales_loss = program.precision == "16-mixed"
        self.scale = 65536.0 if self.scales_loss else 1.0
        self.share = 1.0
        self.gradient_norm = math.nan  # of the last step that clipped
        self.synchronised = True
        self.outcome = Outcome(planned=steps)
        self.logged = LoggedValues(program, self.outcome, self.net)
        self.calls: dict[str, int] = {}
        self.steps = self.epoch = self.micro_batches = self.samples = 0
        self.batch_idx = 0
        self.should_stop = self.save_requested = self.changes_ranks = self.limited = False
        self.validated_at = -1
        self.before = {name: one.detach().clone() for name, one in self.net.named_parameters()}
        self.averages: dict[str, Tensor] = {}
        self.updates = 0
        self.trained: dict[str, Tensor] = {}  # while the network holds the averages

    def hook(self, name: str, micro: GlobalBatch | None = None) -> None:
        raise NotImplementedError

    def new_rank(self, rank: int, seed: int) -> Rank:
        buffers = {name: one.clone() for name, one in self.net.named_buffers()}
        return Rank(buffers, torch.Generator().manual_seed(seed + rank).get_state(), [None] * len(self.parameters))

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[Rank]:
        """Give the network and the process the state of ``rank`` within the context."""
        this = self.ranks[rank]
        outside = torch.get_rng_state()
        torch.set_rng_state(this.generator)
        put_buffers(self.net, this.buffers)
        for parameter, gradient in zip(self.parameters, this.gradients, strict=True):
            parameter.grad = gradient
        try:
            with self.in_half():
                yield this
        finally:
            this.buffers = dict(self.net.named_buffers())
            this.gradients = [parameter.grad for parameter in self.parameters]
            this.generator = torch.get_rng_state()
            torch.set_rng_state(outside)

    @contextlib.contextmanager
    def in_half(self) -> Iterator[None]:
        """Compute with half-precision parameters as ZeRO does; the optimizer's parameters stay exact."""
        dtype = AUTOCAST.get(self.program.precision)
        if dtype is None or not self.strategy.startswith("deepspeed"):
            yield
            return
        norms = [layer for layer in self.net.modules() if isinstance(layer, nn.BatchNorm1d)]
        cast_again = {id(one) for layer in norms for one in layer.parameters()}  # rounded, but used in float32
        linears = [layer for layer in self.net.modules() if type(layer) is nn.Linear and "stage_3" in self.strategy]
        for layer in linears:
            layer.forward = partial(add_bias_to_rounded_product, layer)  # type: ignore[method-assign]
        exact = [(parameter, parameter.data, parameter.grad) for parameter in self.parameters]
        for parameter, data, _ in exact:
            parameter.grad = None
            rounded = data.to(dtype)
            parameter.data = rounded.to(data.dtype) if id(parameter) in cast_again else rounded
        try:
            yield
        finally:
            for layer in linears:
                del layer.forward
            for parameter, data, before in exact:
                fresh, parameter.grad, parameter.data = parameter.grad, None, data
                fresh = None if fresh is None else fresh.to(dtype).to(data.dtype)
                parameter.grad = before if fresh is None else fresh if before is None else before + fresh

    def average_gradients(self) -> None:
        """Replace `Rank.gradients` by their mean over ranks, on all ranks."""
        for position, parameter in enumerate(self.parameters):
            held = [rank.gradients[position] for rank in self.ranks]
            if any(gradient is not None for gradient in held):
                shares = [torch.zeros_like(parameter) if one is None else one / len(held) for one in held]
                mean = sum(shares[1:], shares[0])
                for rank in self.ranks:
                    rank.gradients[position] = mean.clone()
            parameter.grad = self.ranks[0].gradients[position]

    def copy_gradients_to_ranks(self) -> None:
        for rank in self.ranks:
            rank.gradients = [None if one.grad is None else one.grad.clone() for one in self.parameters]

    def clear(self, parameters: list[Any]) -> None:
        known = {id(one) for one in parameters}
        for position, parameter in enumerate(self.parameters):
            if id(parameter) in known:
                parameter.grad = None
                for rank in self.ranks:
                    rank.gradients[position] = None

    @contextlib.contextmanager
    def around_forwards(self, micro: MicroBatch, first: bool, last: bool) -> Iterator[None]:
        """Run all ranks' forwards of a micro-batch, the ``first`` or ``last`` of its window, within the context.

        Buffers are broadcast as DDP does, after a backward that synchronised, and so not after a dropped window. A rank
        that only joins has its buffers of before again afterwards.
        """
        joiners = [state for state, joins in zip(self.ranks, micro.joins, strict=True) if joins]
        before = [{name: one.clone() for name, one in rank.buffers.items()} for rank in joiners]
        if self.broadcasts_buffers() and first and self.synchronised:
            self.broadcast_buffers()
        yield
        self.synchronised = last
        for rank, buffers in zip(joiners, before, strict=True):
            rank.buffers = buffers

    def broadcast_buffers(self) -> None:
        for rank in self.ranks[1:]:
            rank.buffers = {name: one.clone() for name, one in self.ranks[0].buffers.items()}

    def broadcasts_buffers(self) -> bool:
        return self.world > 1 and self.strategy.startswith("ddp") and self.program.broadcast is not False

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.program.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(DEVICE, dtype)

    def micro_batch(self, samples: GlobalBatch) -> MicroBatch:
        """Return a global micro-batch; a rank without samples joins with its last ones, or with one of rank 0's."""
        program = self.program
        for mine, state in zip(samples, self.ranks, strict=True):
            if mine or program.data.kind not in OWN_PARTS:
                state.last = mine or samples[0][:1]
        parts = [self.cast(program.data, state.last) for state in self.ranks]
        weigh = self.net.weight if program.token_weighted else lambda given: float(len(given[2]))
        weights = [weigh(given) if mine else 0.0 for given, mine in zip(parts, samples, strict=True)]
        return MicroBatch(samples, parts, [not mine for mine in samples], weights)

    def cast(self, data: Data, mine: list[int]) -> Parts:
        x, y, index = (part[mine].to(DEVICE) for part in samples_of(data, self.net.on_tokens))
        dtype = DTYPES.get(self.program.precision)
        if dtype is not None and not self.net.on_tokens:
            x, y = x.to(dtype), y.to(dtype)
        return x, y, index


def add_bias_to_rounded_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute a linear layer as ZeRO 3 does for inputs with more than two dimensions."""
    if layer.bias is None or x.dim() == 2:
        return nn.functional.linear(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight) + layer.bias


def put_buffers(net: Model, buffers: dict[str, Tensor]) -> None:
    for name, value in buffers.items():
        path, _, last = name.rpartition(".")
        net.get_submodule(path)._buffers[last] = value
