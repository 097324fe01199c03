"""The networks that the cases train: plain `torch.nn` modules with a ``loss(batch)``, independent of any engine."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional as F

Batch = tuple[Tensor, ...]
"""Inputs, targets and, last, each sample's index in the data set."""

PADDING = -100
"""The label of a token that counts for nothing."""


class Net(nn.Module):
    """A network with a loss that is a mean over ``weight(batch)`` items.

    Attributes:
        splits: the layers that tensor parallelism splits.
    """

    splits: ClassVar[dict[str, ParallelStyle]] = {}

    def split(self, mesh: DeviceMesh) -> None:
        """Split the layers over ``mesh``, as a user does in ``configure_model``."""
        parallelize_module(self, mesh, self.splits)

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def weight(self, batch: Batch) -> float:
        return len(batch[0])


class Mlp(Net):
    """Maps six numbers to three."""

    splits: ClassVar[dict[str, ParallelStyle]] = {"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.head = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


class FrozenMlp(Mlp):
    """An MLP whose first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)


class OrphanMlp(Mlp):
    """An MLP with a trainable layer that no loss uses."""

    splits: ClassVar[dict[str, ParallelStyle]] = {**Mlp.splits, "spare": ColwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 3)


class NormedMlp(Mlp):
    """An MLP with BatchNorm, whose statistics are those of each rank's own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


class TiedTokens(Net):
    """Maps tokens to tokens; embedding and output layer share one parameter, and the loss is a mean over tokens."""

    splits: ClassVar[dict[str, ParallelStyle]] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "mix": ColwiseParallel(output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.mix = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def split(self, mesh: DeviceMesh) -> None:
        super().split(mesh)
        self.head.weight = self.embed.weight  # splitting gave each layer a parameter of its own

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.head(self.norm(hidden + torch.tanh(self.mix(hidden))))

    def loss(self, batch: Batch) -> Tensor:
        labels = batch[1].flatten()
        counts = labels != PADDING
        losses = F.cross_entropy(self(batch[0]).flatten(0, 1), labels.clamp(min=0), reduction="none")
        # The mean over no tokens is NaN, and so are its gradients (those of ``ignore_index`` would be zero).
        return (losses * counts).sum() / counts.sum()

    def weight(self, batch: Batch) -> float:
        return int((batch[1] != PADDING).sum())


class TiedSamples(TiedTokens):
    """The same for samples with equal numbers of tokens; the loss is weighted by samples."""

    def weight(self, batch: Batch) -> float:
        return len(batch[0])


class SparseBag(Net):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(11, 8, mode="sum", sparse=True)
        self.head = nn.Linear(8, 11)

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.head(self.embed(batch[0])), batch[1][:, 0])


class Gan(Net):
    """A generator and a discriminator, with a layer or two each."""

    splits: ClassVar[dict[str, ParallelStyle]] = {
        "generator.0": ColwiseParallel(),
        "generator.2": RowwiseParallel(),
        "discriminator.0": ColwiseParallel(),
        "discriminator.2": RowwiseParallel(),
    }

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def discriminator_loss(self, batch: Batch) -> Tensor:
        real, fake = self.discriminator(batch[0]), self.discriminator(self.generator(batch[1]).detach())
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    def generator_loss(self, batch: Batch) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(batch[1]))).mean()


def numbers(samples: int) -> Batch:
    """Inputs (n, 6), targets (n, 3), indices (n,)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    return x, torch.sin(2 * x[:, :3]) + x[:, 3:], torch.arange(samples)


def tokens(samples: int, length: int = 5) -> Batch:
    """Tokens (n, length), labels (n, length), indices (n,)."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, 11, (samples, length), generator=generator)
    return words, (3 * words + 1) % 11, torch.arange(samples)
