"""Random numbers drawn in validation do not change those that training draws. Row I-13."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_case import Regression, fit, regression
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from drivetrain import Callback
from drivetrain.data._loader_generators import collect_generators


def draw() -> float:
    """Return a number from each of the process's generators."""
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Noisy(Dataset[Any]):
    """Adds noise from its own generators and the process's to its samples."""

    def __init__(self, samples: int = 24) -> None:
        data: Any = regression(samples).dataset
        self.x, self.y = data.tensors
        self.numpy = np.random.default_rng(5)
        self.older = np.random.RandomState(6)
        self.python = random.Random(7)
        self.torch = torch.Generator().manual_seed(8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        own = self.numpy.normal() + self.older.normal() + self.python.gauss(0, 1)
        own += float(torch.randn((), generator=self.torch))
        return self.x[index] + 0.1 * (own + draw()), self.y[index]


class Dropping(Regression):
    """Draws random numbers in training, validation and every validation hook."""

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))  # type: ignore[assignment]
        self.generator = torch.Generator().manual_seed(9)
        self.draws = draws

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (1 + torch.rand((), generator=self.generator)) * (1 + 0.1 * draw())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.draws:
            draw()
            torch.rand((), generator=self.generator)
        self.log("val", self.loss(batch))


class Hooks(Callback):
    """Draws random numbers in each hook around validation."""

    def __init__(self) -> None:
        self.called: set[str] = set()
        for name in (
            *("on_sanity_check_start", "on_sanity_check_end", "on_validation_start", "on_validation_end"),
            *("on_validation_epoch_start", "on_validation_epoch_end"),
            *("on_validation_batch_start", "on_validation_batch_end"),
        ):
            setattr(self, name, self._drawing(name))

    def _drawing(self, name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            self.called.add(name)
            draw()

        return hook


def trained(path: Path, data: Any, validation: Any = None, **options: Any) -> torch.Tensor:
    module = Dropping()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    hooks = Hooks()
    options.setdefault("num_sanity_val_steps", 0)
    fit(path, max_epochs=2, callbacks=hooks, seed=None, **options).fit(module, data, validation)
    assert validation is None or len(hooks.called) == (8 if options["num_sanity_val_steps"] else 6)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def by_hand(data: Dataset[Any]) -> torch.Tensor:
    """The reference: a loop without validation."""
    module = Dropping()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for batch in DataLoader(data, 4):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 0.5}, {"val_check_interval": 1}])
@pytest.mark.parametrize("sanity", [0, 2])
def test_weights_equal_a_run_without_validation_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], sanity: int
) -> None:
    # I-13: the data set is also training's, with generators of its own, as after `random_split`.
    data = Noisy()
    validation = DataLoader(data, 4, shuffle=True)
    # Without a given seed, the seed of the order is drawn at the start of the run, not from the generators that steps
    # use.
    found = trained(tmp_path, DataLoader(data, 4), validation, num_sanity_val_steps=sanity, **options)
    without = trained(tmp_path, DataLoader(Noisy(), 4))
    assert torch.equal(found, without)


def test_weights_equal_a_hand_written_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # I-13
    monkeypatch.setattr(
        "drivetrain._engine.seeding.last_seed", lambda: 0
    )  # otherwise the order's seed is one draw from torch's generator
    data = Noisy()
    found = trained(tmp_path, DataLoader(data, 4), DataLoader(data, 4, shuffle=True), val_check_interval=2)
    assert torch.equal(found, by_hand(Noisy()))


def test_workers_of_a_validation_loader_do_not_affect_training(tmp_path: Path) -> None:
    # I-13: torch draws their base seed from the process's generator.
    validation = DataLoader(regression().dataset, 4, num_workers=1)
    found = trained(tmp_path, regression(), validation, val_check_interval=0.5)
    assert torch.equal(found, trained(tmp_path, regression()))


def test_a_generator_shared_by_both_loaders(tmp_path: Path) -> None:
    # I-13
    def loaders() -> tuple[Any, ...]:
        data: Any = regression().dataset
        generator = torch.Generator().manual_seed(4)
        return tuple(DataLoader(data, 4, sampler=RandomSampler(data, generator=generator)) for _ in range(2))

    options = {"use_distributed_sampler": False}
    train, validation = loaders()
    found = trained(tmp_path, train, validation, val_check_interval=0.5, **options)
    assert torch.equal(found, trained(tmp_path, loaders()[0], **options))


class Noise:
    """A transform or ``collate_fn`` with its own generator."""

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


class Transformed(Dataset[Any]):
    """Applies a transform to its inputs."""

    def __init__(self, transform: Any) -> None:
        data: Any = regression(12).dataset
        self.x, self.y = data.tensors
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.x[index]), self.y[index]


@pytest.mark.parametrize("kind", ["transform", "composed", "collate_fn"])
def test_an_object_with_a_generator_shared_by_both_loaders(tmp_path: Path, kind: str) -> None:
    # I-13
    def loaders() -> tuple[Any, ...]:
        noise = Noise()
        if kind == "collate_fn":
            return tuple(DataLoader(regression(12).dataset, 4, collate_fn=noise.collate) for _ in range(2))
        transform = Composed(noise) if kind == "composed" else noise
        return tuple(DataLoader(Transformed(transform), 4) for _ in range(2))

    train, validation = loaders()
    found = trained(tmp_path, train, validation, val_check_interval=1)
    assert torch.equal(found, trained(tmp_path, loaders()[0]))


def test_the_search_for_generators_is_bounded() -> None:
    # I-13: a data set may have a million samples, and objects may refer to each other.
    class Sample:
        looked_at = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                Sample.looked_at += 1
            return super().__getattribute__(name)

    data: Any = Transformed(Composed(Noise()))
    data.samples = [Sample() for _ in range(10_000)]
    assert len(collect_generators(DataLoader(data, 4))) == 2
    assert Sample.looked_at == 0


def test_a_val_dataloader_that_draws_random_numbers(tmp_path: Path) -> None:
    # I-13: as one that calls `random_split` does.
    class Own(Dropping):
        def val_dataloader(self) -> Any:
            draw()
            return regression(8)

    found = []
    for kind in (Own, Dropping):
        module = kind()
        torch.manual_seed(11)
        fit(tmp_path).fit(module, regression())
        found.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*found)


def test_a_resumed_run_draws_like_an_uninterrupted_one(tmp_path: Path) -> None:
    # I-13, F-02: saved in a validation hook, whose draws do not affect training.
    class Saving(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            draw()
            if trainer.global_step == 3:
                trainer.save_checkpoint(str(tmp_path / "saved"))

    weights = []
    for callbacks, path in (([Saving()], None), ([], str(tmp_path / "saved"))):
        module = Dropping(draws=False)
        module.generator = torch.Generator().manual_seed(9)
        module.training_step = lambda batch, batch_idx, module=module: module.loss(batch)  # type: ignore[method-assign, misc]
        torch.manual_seed(11)
        run = fit(tmp_path, max_epochs=2, val_check_interval=3, callbacks=callbacks, num_sanity_val_steps=0)
        run.fit(module, DataLoader(regression().dataset, 4, shuffle=True), regression(8), ckpt_path=path)
        assert run.global_step == 12
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*weights)
