"""Random numbers drawn in validation do not change those that training draws. Row I-13."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_case import Regression, fit, regression
from small_modules import calling
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from drivetrain import Callback

HOOKS = ["on_sanity_check_start", "on_sanity_check_end", "on_validation_start", "on_validation_end"]
HOOKS += ["on_validation_epoch_start", "on_validation_epoch_end"]
HOOKS += ["on_validation_batch_start", "on_validation_batch_end"]


def draw() -> float:
    """Return a number from each of the process's generators."""
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Noisy(Dataset[Any]):
    """Adds noise from its own generators and the process's to its samples, or transforms them."""

    def __init__(self, transform: Any = None) -> None:
        data: Any = regression().dataset
        self.x, self.y = data.tensors
        self.transform = transform
        self.numpy = np.random.default_rng(5)
        self.older = np.random.RandomState(6)
        self.python = random.Random(7)
        self.torch = torch.Generator().manual_seed(8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if self.transform is not None:
            return self.transform(self.x[index]), self.y[index]
        own = self.numpy.normal() + self.older.normal() + self.python.gauss(0, 1)
        own += float(torch.randn((), generator=self.torch))
        return self.x[index] + 0.1 * (own + draw()), self.y[index]


class Dropping(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))  # type: ignore[assignment]
        self.generator = torch.Generator().manual_seed(9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + torch.rand((), generator=self.generator)) * (1 + 0.1 * draw())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        draw()
        torch.rand((), generator=self.generator)
        self.log("val", self.loss(batch))

    def val_dataloader(self) -> Any:
        draw()  # as one that calls `random_split` does
        return regression(8)


def seed_generators() -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


def weights_of(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def trained(path: Path, data: Any, validation: Any = None, **options: Any) -> torch.Tensor:
    """Train; each hook around validation draws random numbers too."""
    module = Dropping()
    called: dict[str, float] = {}

    def drawing(hook: str) -> Callback:
        return calling(hook, lambda trainer: called.update({hook: draw()}))

    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0 if validation is None else 1.0, **options}
    seed_generators()
    fit(path, max_epochs=2, callbacks=[*map(drawing, HOOKS)], seed=None, **options).fit(module, data, validation)
    assert validation is None or len(called) == (8 if options["num_sanity_val_steps"] else 6)
    return weights_of(module)


class Noise:
    """A transform or ``collate_fn`` with its own generators."""

    def __init__(self) -> None:
        self.numpy = np.random.default_rng(5)
        self.torch = torch.Generator().manual_seed(6)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * float(self.numpy.normal())

    def collate(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
        return x + 0.1 * torch.randn(x.shape, generator=self.torch), y


class Composed:
    """Transforms that are applied one after the other."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)
        self.owner = self  # a reference cycle

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x


def both(data: Any, shuffle: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return loaders of training and of validation, which share the data set and the options."""
    return DataLoader(data, 4, **options), DataLoader(data, 4, shuffle=shuffle, **options)


def sampler() -> RandomSampler:
    return RandomSampler(range(24), generator=torch.Generator().manual_seed(6))


LOADERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "data set": lambda: both(Noisy(), shuffle=True),  # as after `random_split`
    "transform": lambda: both(Noisy(Composed(Noise()))),
    "sampler": lambda: both(regression().dataset, sampler=sampler()),
    "collate_fn": lambda: both(regression().dataset, collate_fn=Noise().collate),
    # torch draws the base seed of workers from the process's generator
    "workers": lambda: (regression(), DataLoader(regression().dataset, 4, num_workers=1)),
    "val_dataloader": lambda: (regression(), None),
}


@pytest.mark.parametrize(
    ("kind", "sanity", "interval"), [*((kind, 0, 0.5) for kind in LOADERS), ("data set", 2, 1.0), ("data set", 2, 1)]
)
def test_weights_equal_a_run_without_validation(tmp_path: Path, kind: str, sanity: int, interval: float) -> None:
    # I-13: whatever both loaders share or draw
    options: dict[str, Any] = {"use_distributed_sampler": kind != "sampler"}
    expected = trained(tmp_path, LOADERS[kind]()[0], **options)
    options |= {"num_sanity_val_steps": sanity, "val_check_interval": interval, "limit_val_batches": 1.0}
    assert torch.equal(trained(tmp_path, *LOADERS[kind](), **options), expected)


def test_weights_equal_a_hand_written_loop_that_reads_each_batch_in_time(tmp_path: Path, monkeypatch: Any) -> None:
    # I-13, I-09, B-18; private: otherwise the seed of the order is one draw from torch's generator
    monkeypatch.setattr("drivetrain._runtime.seed._last_seed", 0)
    data = Noisy()
    options: dict[str, Any] = {"val_check_interval": 2, "accumulate_grad_batches": 2}
    found = trained(tmp_path, DataLoader(data, 4), DataLoader(data, 4, shuffle=True), **options)
    # Written by hand: data set and module draw in turn from every generator of the process.
    module, again = Dropping(), Noisy()
    seed_generators()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for index, batch in enumerate(DataLoader(again, 4)):
            (module.training_step(batch, index) / 2).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(found, weights_of(module))


def test_the_search_for_generators_is_bounded() -> None:
    # I-13: a data set may have a million samples, and objects may refer to each other; private: its cost is counted
    from drivetrain._data.loader_generators import collect_generators

    class Sample:
        looked_at = 0

        def __getattribute__(self, name: str) -> Any:
            Sample.looked_at += name == "__dict__"
            return super().__getattribute__(name)

    data: Any = Noisy(Composed(Noise()))
    data.samples = [Sample() for _ in range(10_000)]
    assert len(collect_generators(DataLoader(data, 4))) == 6
    assert Sample.looked_at == 0
