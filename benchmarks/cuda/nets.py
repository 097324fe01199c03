"""The network that is timed on a GPU in addition to those of `benchmarks.work`: GPT-2 with 124 million parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Shape of a GPT. ``vocabulary`` is GPT-2's 50,257, rounded up to a multiple that multiplies fast."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    vocabulary: int = 50304
    length: int = 1024
    batch: int = 16


GPT_124M = Shape()
TINY = Shape(width=32, depth=2, heads=2, vocabulary=64, length=16, batch=2)
"""For a rehearsal."""


class Block(nn.Module):
    """Attention and an MLP, each with a norm before and a residual sum after it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm, self.next_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        parts = self.attention(self.norm(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.narrow(F.gelu(self.wide(self.next_norm(hidden)), approximate="tanh"))


class GPT2(nn.Module):
    """Maps tokens of shape (batch, time + 1) to the mean next-token loss; embedding and head share one parameter."""

    def __init__(self, shape: Shape = GPT_124M) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.tokens(text[:, :-1]) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), text[:, 1:].flatten())


def tokens(count: int, shape: Shape) -> Tensor:
    """Random tokens of shape (count, length + 1), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (count, shape.length + 1), generator=generator)


def flops_a_token(net: nn.Module, shape: Shape) -> float:
    """Return FLOPs of forward and backward: 6 N, and 12 L d T for attention (Chowdhery et al., PaLM, appendix B)."""
    count = sum(parameter.numel() for parameter in net.parameters())
    return 6 * count + 12 * shape.depth * shape.width * shape.length
