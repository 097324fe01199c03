"""The networks that are measured, and the checksum by which trained ones are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 256, 64
BATCH = 4  # sequences per rank

Data = Callable[[Tensor], Dataset[Any]]
"""Makes of the texts a data set of 1-tuples, as `TensorDataset` does."""


class GPT(nn.Module):
    """A small GPT: maps tokens of shape (batch, time) to the mean next-token loss."""

    def __init__(self, width: int = 128, depth: int = 2, heads: int = 4, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.tokens(text[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=hidden.device)
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def texts(count: int) -> Tensor:
    """Return random tokens of shape (count, LENGTH + 1), the same on every call."""
    return torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def checksum(net: nn.Module) -> float:
    """Return the sum of all parameters, whether they are sharded or not."""
    parameters = (parameter.detach() for parameter in net.parameters())
    whole = (value.full_tensor() if isinstance(value, DTensor) else value for value in parameters)
    return sum(float(value.double().sum()) for value in whole)
