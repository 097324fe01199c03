"""Computes what tensor parallelism over two ranks computes, in one process."""

from __future__ import annotations

import torch
from parity_nets import Net
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F


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


def compute_in_two(net: Net) -> None:
    """Let the layers that a user would split compute in two parts. Their parameters are unchanged."""
    for name, style in net.splits.items():
        layer = net.get_submodule(name)
        if isinstance(layer, nn.Linear):  # only one of the parts of an embedding is nonzero
            layer.__class__ = _Columns if isinstance(style, ColwiseParallel) else _Rows
