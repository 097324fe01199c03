"""The networks whose steps are timed in one process, and the loop that a user would write for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.nets import BATCH, GPT, checksum, texts

ROWS = 8  # batch size of the networks on numbers


@dataclass(frozen=True)
class Way:
    """What is enabled in addition to the step itself.

    Attributes:
        name: as the table calls it.
        values: how many are logged in each step.
        typical: with a progress bar on a terminal, a CSV logger, and a checkpoint callback that has nothing to do yet.
    """

    name: str
    values: int
    typical: bool = False

    @property
    def names(self) -> list[str]:
        """Return the names of the logged values."""
        return [f"value_{number}" for number in range(self.values)]


WAYS = [Way("bare", 0), Way("one value", 1), Way("five values", 5), Way("typical", 1, typical=True)]
EVERY = 50  # steps between two rows of logged values, the default of frameworks that have one
NEVER = 10**9  # steps between two checkpoints


@dataclass(frozen=True)
class Work:
    """A network, its data and its optimizer. Every loop does this work, to the last bit.

    Attributes:
        name: as the table calls it.
        build: makes the network.
        loss: the loss of the network, possibly wrapped by a framework, on a batch.
        optimizer: builds the optimizer of the network.
        data: makes the data for a number of batches.
        batch: the batch size.
        short: steps of the run whose time is subtracted.
        long: steps of the other run: enough for variations of start-up to be negligible.
        fewer: the same for loops that take several times as long.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, list[Tensor]], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    data: Callable[[int], Dataset[tuple[Tensor, ...]]]
    batch: int
    short: int
    long: int
    fewer: int

    def net(self) -> nn.Module:
        """Return the network, the same on every call."""
        torch.manual_seed(0)
        return self.build()

    def loader(self, steps: int) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader of ``steps`` batches, the same on every call."""
        return DataLoader(self.data(steps), batch_size=self.batch)


def raw(work: Work, steps: int) -> float:
    """Run the loop without a framework; returns a checksum of the weights."""
    net = work.net()
    optimizer = work.optimizer(net)
    loss_of = work.loss
    for batch in work.loader(steps):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    return checksum(net)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def _squares(net: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(net(inputs), targets)


def _next_token(net: nn.Module, batch: list[Tensor]) -> Tensor:
    loss: Tensor = net(batch[0])
    return loss


@functools.cache  # cached, so that creating it is not timed
def _numbers(steps: int) -> TensorDataset:
    inputs = torch.randn(steps * ROWS, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


@functools.cache
def _texts(steps: int) -> TensorDataset:
    return TensorDataset(texts(steps * BATCH))


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


WORKS = {
    work.name: work
    for work in (
        Work("linear", lambda: nn.Linear(8, 1), _squares, _sgd, _numbers, ROWS, 100, 2000, 500),
        Work("mlp", _mlp, _squares, _sgd, _numbers, ROWS, 100, 1200, 400),
        Work("gpt", GPT, _next_token, _adamw, _texts, BATCH, 4, 32, 32),
    )
}
"""From the smallest to the largest: a step of about 0.1, 0.3 and 15 ms."""
