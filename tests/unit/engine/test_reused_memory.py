"""Loaders that overwrite the previous batch. Row I-09."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from drivetrain import Fit, TrainModule
from drivetrain.data import CombinedLoader
from drivetrain.testing import requires_cuda

FEATURES, SAMPLES, SIZE = 4, 22, 4


def data() -> torch.Tensor:
    """Return inputs, and targets in the last column."""
    return torch.randn(SAMPLES, FEATURES + 1, generator=torch.Generator().manual_seed(1))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return data()[index]


class OneBuffer:
    """Collates into the same tensor every time."""

    def __init__(self) -> None:
        self.buffer = torch.empty(SIZE, FEATURES + 1)

    def __call__(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows, out=self.buffer[: len(rows)])


class OneArray:
    """Yields the same dict over one numpy array, which it overwrites without torch's knowledge."""

    def __init__(self, pinned: bool = False, device: str = "cpu") -> None:
        self.tensor = torch.empty(SIZE, FEATURES + 1, pin_memory=pinned, device=device)
        self.array = self.tensor.numpy() if device == "cpu" else self.tensor
        self.batch: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Any]:
        rows: Any = data().numpy() if isinstance(self.array, np.ndarray) else data().to(self.tensor.device)
        for start in range(0, SAMPLES, SIZE):
            part = rows[start : start + SIZE]
            self.array[: len(part)] = part
            self.batch["rows"] = self.tensor[: len(part)]
            yield self.batch


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


LOADERS: dict[str, Callable[[], Any]] = {
    "collated": lambda: DataLoader(Rows(), batch_size=SIZE, collate_fn=OneBuffer()),
    "a sampler of batches": lambda: DataLoader(
        Rows(), batch_sampler=Fives(SequentialSampler(Rows()), SIZE, drop_last=False), collate_fn=OneBuffer()
    ),
    "an iterable": OneArray,
    "an iterable data set": lambda: DataLoader(Stream(), batch_size=None),
    "two buffers": Alternating,
    "several": lambda: CombinedLoader({"one": OneArray(), "other": Alternating()}, "max_size"),
}


class Fives(BatchSampler):
    """A user's batch sampler, whose batches are not sharded."""


class Regression(TrainModule):
    """A two-layer network; its dropout draws from the process's generator."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def rows(self, batch: Any) -> torch.Tensor:
        while isinstance(batch, dict):
            batch = batch["rows"] if "rows" in batch else batch["one"]
        return batch

    def loss(self, batch: Any) -> torch.Tensor:
        rows = self.rows(batch)
        return nn.functional.mse_loss(self.net(rows[:, :FEATURES]), rows[:, FEATURES:])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weighed(Regression):
    def batch_weight(self, batch: Any) -> Any:
        return len(self.rows(batch))


class Quasi(Regression):
    """Evaluates each window several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def fitted(module: Regression, loader: Any, **settings: Any) -> torch.Tensor:
    options = {"accelerator": "cpu", "barebones": True, "max_epochs": 2, "use_distributed_sampler": True}
    Fit(**{**options, **settings}).fit(module, loader)
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


def by_hand(module: Regression, window: int) -> torch.Tensor:
    """The reference in plain PyTorch: one window at a time, with losses weighted by samples."""
    optimizer = module.configure_optimizers()
    parts = data().split(SIZE)
    for start in [*range(0, len(parts), window)] * 2:
        batches = parts[start : start + window]
        total = sum(map(len, batches))

        def closure(batches: Any = batches, total: int = total) -> torch.Tensor:
            optimizer.zero_grad()
            losses = [module.loss(batch) * (len(batch) / total) for batch in batches]
            for loss in losses:
                loss.backward()
            return torch.stack(losses).sum().detach()

        optimizer.step(closure)
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("module", [Regression, Weighed, Quasi])
def test_a_loader_that_reuses_memory_is_correct_under_accumulation(kind: str, module: type[Regression]) -> None:
    # I-09
    for window in (1, 3):
        trained = fitted(module(), LOADERS[kind](), accumulate_grad_batches=window)
        torch.testing.assert_close(trained, by_hand(module(), window), atol=1e-6, rtol=1e-5)


@pytest.mark.cuda
@requires_cuda()
@pytest.mark.parametrize("where", ["pinned", "on the device"])
@pytest.mark.parametrize("window", [1, 3])
def test_memory_that_a_device_still_reads_is_not_overwritten(where: str, window: int) -> None:  # I-09
    loader = OneArray(pinned=True) if where == "pinned" else OneArray(device="cuda")
    trained = fitted(Regression(), loader, accelerator="cuda", devices=1, accumulate_grad_batches=window)
    torch.testing.assert_close(trained, by_hand(Regression(), window), atol=1e-5, rtol=1e-4)


class Drawing(Dataset[Any]):
    """Draws from dropout's generator when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            torch.manual_seed(5)  # independent of random numbers drawn before the first sample
        return data()[index] + 0.1 * torch.randn(FEATURES + 1)


class Dropping(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.5))


def test_a_batch_is_read_just_before_its_use() -> None:  # I-09, B-18
    """A data set and dropout draw alternately as in a hand-written loop, also with accumulation."""
    loader = DataLoader(Drawing(), batch_size=SIZE)
    with torch.random.fork_rng():
        trained = fitted(Dropping(), loader, accumulate_grad_batches=3, max_epochs=1)
    reference = Dropping()
    optimizer = reference.configure_optimizers()
    with torch.random.fork_rng():
        order = list(range(0, SAMPLES, SIZE))
        for start in range(0, len(order), 3):
            window = [range(first, min(first + SIZE, SAMPLES)) for first in order[start : start + 3]]
            total = sum(map(len, window))
            optimizer.zero_grad()
            for indices in window:
                batch = torch.stack([loader.dataset[index] for index in indices])
                (reference.loss(batch) * (len(batch) / total)).backward()
            optimizer.step()
    torch.testing.assert_close(
        trained, nn.utils.parameters_to_vector(reference.parameters()).detach(), atol=1e-6, rtol=1e-5
    )


def test_immutable_batches_are_not_copied() -> None:
    """Batches that torch collates, and lists of batches, are not copied."""
    seen: list[int] = []

    class Watching(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch.data_ptr())
            return self.loss(batch)

    batches = list(data().split(SIZE))
    fitted(Watching(), batches, accumulate_grad_batches=3, max_epochs=1)
    assert seen == [batch.data_ptr() for batch in batches]
