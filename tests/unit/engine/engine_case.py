"""A tiny model, tiny data and a quiet Fit, for tests of what the engine does in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain._loops.hooks import HOOKS
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain.callback import Callback as CallbackBase

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "seed": 0,
}


def fit(path: Path, **options: Any) -> Fit:
    """A Fit without output, whose files would go to ``path``."""
    return Fit(**{"default_root_dir": path, "max_epochs": 1, **QUIET, **options})


class Numbered(Dataset[torch.Tensor]):
    """Sample i is the vector (i, 1): a batch tells which samples it holds. Their number may change."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.samples:
            raise IndexError(index)
        return torch.tensor([float(index), 1.0])


class Stream(IterableDataset[torch.Tensor]):
    """The same samples, without a length."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index), 1.0]) for index in range(self._samples))


def loader(samples: int = 8, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    """Return a loader of sample numbers, in order unless ``shuffle``."""
    return DataLoader(Numbered(samples), batch_size=batch_size, **options)


def stream(samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    """Sample numbers from an iterable data set without a length."""
    return DataLoader(Stream(samples), batch_size=batch_size)


def regression(samples: int = 24, batch_size: int = 4, seed: int = 1) -> DataLoader[Any]:
    """A linear problem with noise, in order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def numbers(batch: torch.Tensor) -> list[int]:
    """Return the samples in a batch of `Numbered` or `Stream`."""
    return [int(value) for value in batch[:, 0]]


class Tiny(TrainModule):
    """Has one weight; records the samples of each step."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.lr = lr
        self.seen: list[Any] = []
        self.evaluated: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(numbers(batch))
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.evaluated.append(numbers(batch))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return numbers(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class FirstOfSeveral(Tiny):
    """Takes the first batch of several loaders' batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0] if isinstance(batch, list) else batch, batch_idx)


class Bare(TrainModule):
    """Has a minimal step, so that the cost of the loop around it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Regression(TrainModule):
    """A linear layer on `regression`."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 1)
        self.lr = lr

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def recording_callback(name: str, calls: list[str], priority: int = 0) -> Callback:
    """A callback that records every hook as ``"name.hook"``."""

    def noting(hook: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(f"{name}.{hook}")

        return call

    kind = type("Recording", (CallbackBase,), {hook: noting(hook) for hook in HOOKS} | {"priority": priority})
    return kind()


def recording_module(calls: list[str], base: type[TrainModule] = Tiny) -> TrainModule:
    """A module that records every hook and step as ``"module.hook"``."""
    hooks = [name for name in vars(ModuleHooks) if not name.startswith("_")]
    steps = ["training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"]
    steps += ["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"]

    def noting(hook: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"module.{hook}")
            return getattr(base, hook)(self, *args, **kwargs)

        return call

    defined = [hook for hook in steps if getattr(base, hook) is not getattr(TrainModule, hook)]
    kind = type("RecordingModule", (base,), {hook: noting(hook) for hook in [*hooks, *defined]})
    return kind()
