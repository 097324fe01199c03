"""User code of a program: networks and their losses in plain PyTorch, trained by both the loop and the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from oracle.program import Change, Net, Program

FEATURES, WIDTH, VOCABULARY, LENGTH, PADDING = 4, 6, 7, 5, -100

DEVICE = os.environ.get("PARITY_DEVICE", "cpu")
"""The kind of device of the engine and of the interpreter: the CPU, or the one that `make cuda` requests."""

Parts = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and the samples' indices."""


class Model(nn.Module):
    drift: Tensor

    def __init__(self, plan: Net) -> None:
        super().__init__()
        self.plan = plan
        self.on_tokens = plan.on_tokens
        self.body = BODIES[plan.family](plan)
        linear = nn.Linear(WIDTH, VOCABULARY if self.on_tokens else 1, bias=not plan.tied)
        self.head: Any = discriminator() if plan.family == "gan" else linear
        if plan.tied:
            self.head.weight = self.body.embedding.weight
        self.scale = nn.Parameter(torch.ones(1)) if plan.scale else None
        self.orphan = nn.Parameter(torch.ones(2)) if plan.unused else None
        if plan.buffer != "none":
            self.register_buffer("drift", torch.full((), 0.5))
        if plan.hooked:
            weight: Any = self.head.weight
            weight.register_hook(lambda gradient: gradient / 2)
            weight.slow = True
        for part in part_of(self, plan.frozen):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        if self.plan.buffer != "none":
            hidden = hidden + self.drift
            if self.training:
                moved = (0.8 * self.drift + 0.2 * (hidden.detach().mean() + 0.3)).to(self.drift.dtype)
                if self.plan.buffer == "in_place":
                    self.drift.copy_(moved)
                else:
                    self.drift = moved
        output: Tensor = self.head(hidden)
        return output if self.scale is None else output * self.scale

    def loss(self, parts: Parts) -> Tensor:
        """Return the mean loss over samples, or over tokens that are not padding."""
        x, y, _ = parts
        return self.loss_of(self(x), y)

    def loss_of(self, output: Tensor, y: Tensor) -> Tensor:
        if self.plan.family == "bag":
            return nn.functional.cross_entropy(output, y[:, 0])
        if self.on_tokens:
            counted = y.flatten() != PADDING
            labels = y.flatten().clamp(min=0)
            losses = nn.functional.cross_entropy(output.flatten(0, 1), labels, reduction="none")
            # The mean over no tokens is NaN, and so are its gradients (those of ``ignore_index`` would be zero).
            return (losses * counted).sum() / counted.sum()
        return nn.functional.mse_loss(output, y)

    def loss_of_part(self, part: str, parts: Parts) -> Tensor:
        """Return the loss that an optimizer of ``part`` minimises: a GAN's players have different ones."""
        x, y, _ = parts
        if self.plan.family != "gan":
            return self.loss(parts)
        if part == "head":
            real, fake = self.head(x), self.head(self.body(y).detach())
            return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()
        return nn.functional.softplus(-self.head(self.body(y))).mean()

    def weight(self, parts: Parts) -> float:
        """Return the number of items over which `loss` is a mean."""
        return float((parts[1] != PADDING).sum()) if self.on_tokens else float(len(parts[1]))

    def penalty(self) -> Tensor:
        return 0.1 * self.head.weight.square().mean()


class BatchNorm(nn.BatchNorm1d):
    """A batch norm that does not normalise a single sample, which has no variance."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 1 else x * self.weight + self.bias


def mlp(plan: Net) -> nn.Module:
    dropout = [nn.Dropout(plan.dropout)] if plan.dropout else []
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *norms(plan), nn.Tanh(), *dropout)


def deep_mlp(plan: Net) -> nn.Module:
    layers = [nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, *norms(plan))


def norms(plan: Net) -> list[nn.Module]:
    if plan.norm == "batch":
        return [BatchNorm(WIDTH)]
    return [nn.LayerNorm(WIDTH)] if plan.norm == "layer" else []


def generator(plan: Net) -> nn.Module:
    return nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.rnn(self.dropout(self.embedding(x)))[0]
        return output


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.embedding(x))
        return output


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        output: Tensor = self.norm(hidden + torch.tanh(self.mix(hidden)))
        return output


BODIES: dict[str, Callable[[Net], Any]] = {
    "mlp": mlp,
    "deep_mlp": deep_mlp,
    "gan": generator,
    "gru": lambda plan: Recurrent(plan.dropout),
    "transformer": lambda plan: Transformer(plan.dropout),
    "mixer": lambda plan: Mixer(),
    "bag": lambda plan: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum", sparse=True),
}
"""Builds the body of each family."""


def part_of(net: Model, name: str) -> list[nn.Parameter]:
    """Return the parameters of "all", "body", "head", "first", "matrices" or "vectors"; none for ""."""
    if not name:
        return []
    if name == "all":
        return list(net.parameters())
    if name == "first":
        return list(net.body[0].parameters())
    if name in ("matrices", "vectors"):
        return [one for one in net.parameters() if (one.ndim == 2) == (name == "matrices")]
    if name == "body":  # and parameters of neither
        head = {id(one) for one in net.head.parameters()}
        return [one for one in net.parameters() if id(one) not in head]
    body = {id(one) for one in net.body.parameters()}
    return [one for one in net.head.parameters() if id(one) not in body]


SPLITS: dict[str, dict[str, ParallelStyle]] = {
    "deep_mlp": {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()},
    "mixer": {
        "body.embedding": RowwiseParallel(input_layouts=Replicate()),
        "body.mix": ColwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    },
    "gan": {
        "body.0": ColwiseParallel(),
        "body.2": RowwiseParallel(),
        "head.0": ColwiseParallel(),
        "head.2": RowwiseParallel(),
    },
}
"""Layers split by tensor parallelism, by family of networks; clipping combines their gradients with the others'."""


def split(net: Any, mesh: Any) -> None:
    """Split the layers over ``mesh``, as a user does in ``configure_model``."""
    parallelize_module(net, mesh, SPLITS.get(net.plan.family, {}))
    if net.plan.tied:
        net.head.weight = net.body.embedding.weight  # splitting gave each layer a parameter of its own


class _Columns(nn.Linear):
    """Each part computes half of the outputs; in the backward the parts' gradients of the input are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(x)  # so that the two parts of its gradient are added first
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        parts = zip(self.weight.chunk(2), biases, strict=True)
        return torch.cat([nn.functional.linear(x, weight, bias) for weight, bias in parts], dim=-1)


class _Rows(nn.Linear):
    """Each part gets half of the inputs, and the outputs are added: they are rounded before and after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(2, dim=-1), self.weight.chunk(2, dim=-1), strict=True)
        first, second = (nn.functional.linear(inputs, weight, self.bias / 2) for inputs, weight in parts)
        return first + second


def compute_in_two(net: Any) -> None:
    """Let the layers that a user would split compute in two parts. Their parameters are unchanged."""
    for name, style in SPLITS[net.plan.family].items():
        layer = net.get_submodule(name)
        if isinstance(layer, nn.Linear):  # only one of the parts of an embedding is nonzero
            layer.__class__ = _Columns if isinstance(style, ColwiseParallel) else _Rows


def write(net: Model, what: str) -> None:
    """Write the head's weights or gradients, as user code does; see `oracle.program.Write`."""
    for one in part_of(net, "head"):
        if what == "weights":
            with torch.no_grad():
                one.mul_(0.75)
        elif what == "data":
            one.data.mul_(0.75)
        elif what == "assigned":
            one.data = one.data * 0.75
        elif one.grad is not None and what == "gradients":
            one.grad.mul_(0.5)
        elif one.grad is not None:
            one.grad = one.grad * 0.5


def apply_change(net: Model, change: Change, optimizer: torch.optim.Optimizer) -> None:
    parameters = part_of(net, change.part)
    for one in parameters:
        one.requires_grad_(change.what != "freeze")
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if change.what == "group" and not any(id(one) in known for one in parameters):  # or the hook is called again
        optimizer.add_param_group({"params": parameters})


def seeded_model(program: Program) -> Model:
    """Build the network in float32 with the same weights everywhere, without changing the process's generator."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # another network draws other numbers
    try:
        with torch.random.fork_rng():
            torch.manual_seed(program.seed)
            return Model(program.net)
    finally:
        torch.set_default_dtype(default)
