"""Layers split by tensor parallelism: as a user splits them, and as one process computes the parts of two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

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
"""By family of networks; other layers are not split, so that clipping combines gradients on two meshes."""


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
        return torch.cat([F.linear(x, weight, bias) for weight, bias in parts], dim=-1)


class _Rows(nn.Linear):
    """Each part gets half of the inputs, and the outputs are added: they are rounded before and after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(2, dim=-1), self.weight.chunk(2, dim=-1), strict=True)
        first, second = (F.linear(inputs, weight, self.bias / 2) for inputs, weight in parts)
        return first + second


def compute_in_two(net: Any) -> None:
    """Let the layers that a user would split compute in two parts. Their parameters are unchanged."""
    for name, style in SPLITS[net.plan.family].items():
        layer = net.get_submodule(name)
        if isinstance(layer, nn.Linear):  # only one of the parts of an embedding is nonzero
            layer.__class__ = _Columns if isinstance(style, ColwiseParallel) else _Rows
