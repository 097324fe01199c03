"""Loaders that overwrite the previous batch. Row I-09."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.data import CombinedLoader
from drivetrain.testing import requires_cuda

FEATURES, SAMPLES, SIZE = 4, 22, 4


def data() -> torch.Tensor:
    """Return inputs, and targets in the last column."""
    return torch.randn(SAMPLES, FEATURES + 1, generator=torch.Generator().manual_seed(1))


class OneBuffer:
    """Collates into the same tensor every time."""

    def __init__(self) -> None:
        self.buffer = torch.empty(SIZE, FEATURES + 1)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.stack([row for (row,) in samples], out=self.buffer[: len(samples)])


class OneArray:
    """Yields the same dict over one numpy array, which it overwrites without torch's knowledge."""

    def __init__(self, pinned: bool = False, device: str = "cpu") -> None:
        self.tensor = torch.empty(SIZE, FEATURES + 1, pin_memory=pinned, device=device)
        self.array: Any = self.tensor.numpy() if device == "cpu" else self.tensor

    def __iter__(self) -> Iterator[Any]:
        batch: dict[str, torch.Tensor] = {}
        for part in data().split(SIZE):
            self.array[: len(part)] = part
            batch["rows"] = self.tensor[: len(part)]
            yield batch


class Alternating:
    """Fills one of two buffers while the other is in use, as a loader that prefetches does."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffers = [torch.empty(SIZE, FEATURES + 1), torch.empty(SIZE, FEATURES + 1)]
        parts = list(data().split(SIZE))
        buffers[0].copy_(parts[0])
        for index, part in enumerate(parts):
            if index + 1 < len(parts):
                coming = parts[index + 1]
                buffers[(index + 1) % 2][: len(coming)] = coming
            yield buffers[index % 2][: len(part)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from OneArray()


class UnknownSampler(BatchSampler):
    """A user's batch sampler, whose batches are not sharded."""


def collated(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data()), collate_fn=OneBuffer(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "collated": lambda: collated(batch_size=SIZE),
    "a sampler of batches": lambda: collated(batch_sampler=UnknownSampler(SequentialSampler(data()), SIZE, False)),
    "an iterable": OneArray,
    "an iterable data set": lambda: DataLoader(Stream(), batch_size=None),
    "two buffers": Alternating,
    "several": lambda: CombinedLoader({"one": OneArray(), "other": Alternating()}, "max_size"),
}


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def rows(self, batch: Any) -> torch.Tensor:
        while isinstance(batch, dict):
            batch = batch["rows"] if "rows" in batch else batch["one"]
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.rows(batch)
        self.addresses.append(rows.data_ptr())
        return nn.functional.mse_loss(self.net(rows[:, :FEATURES]), rows[:, FEATURES:])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weighted(Regression):
    def batch_weight(self, batch: Any) -> Any:
        return len(self.rows(batch))


class EvaluatesAgain(Regression):
    """Evaluates each window several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def fitted(module: Regression, loader: Any, window: int, **settings: Any) -> torch.Tensor:
    options: dict[str, Any] = {"accelerator": "cpu", "barebones": True, "max_epochs": 2, **settings}
    Fit(accumulate_grad_batches=window, **options).fit(module, loader)
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("window", "module"), [(1, EvaluatesAgain), (3, Regression), (3, Weighted), (3, EvaluatesAgain)]
)
def test_a_loader_that_reuses_memory_trains_as_batches_of_their_own(
    kind: str, window: int, module: type[Regression]
) -> None:
    # I-09: batches that torch collates, and lists of batches, are not copied
    batches, reference = list(data().split(SIZE)), module()
    expected = fitted(reference, batches, window)
    assert set(reference.addresses) == {batch.data_ptr() for batch in batches}
    trained = fitted(module(), LOADERS[kind](), window)
    torch.testing.assert_close(trained, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.cuda
@requires_cuda()
@pytest.mark.parametrize("options", [{"pinned": True}, {"device": "cuda"}])
@pytest.mark.parametrize("window", [1, 3])
def test_memory_that_a_device_still_reads_is_not_overwritten(options: dict[str, Any], window: int) -> None:  # I-09
    trained = fitted(Regression(), OneArray(**options), window, accelerator="cuda", devices=1)
    expected = fitted(Regression(), list(data().split(SIZE)), window)
    torch.testing.assert_close(trained, expected, atol=1e-5, rtol=1e-4)
