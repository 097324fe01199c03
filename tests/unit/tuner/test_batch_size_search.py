"""The search for a batch size: which sizes are tried, and where the found size is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from tuner_case import FEATURES, Data, Net, loader, quiet

from drivetrain import ConfigurationError
from drivetrain.callbacks import BatchSizeFinder

# Private: the sizes that are tried, without a run for each.
from drivetrain.callbacks._batch_size_search import search_largest
from drivetrain.tuner import Tuner


def _search(limit: int, mode: str, init: int, trials: int = 25, most: int = 10**9) -> tuple[int, list[int]]:
    """Return the found size and the sizes that were tried, where sizes up to ``limit`` fit."""
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= limit

    return search_largest(fits, mode, init, trials, lambda: most if sizes[-1] >= most else None), sizes


@pytest.mark.parametrize(
    ("arguments", "found", "sizes"),
    [
        ((13, "power", 2), 8, [2, 4, 8, 16]),
        ((13, "power", 50), 12, [50, 25, 12]),
        ((13, "binsearch", 2), 13, [2, 4, 8, 16, 12, 14, 13]),
        ((13, "binsearch", 50), 13, [50, 25, 12, 18, 15, 13, 14]),
        ((1, "power", 2), 1, [2, 1]),
        ((1, "binsearch", 4), 1, [4, 2, 1]),
        ((10**9, "power", 2, 3), 8, [2, 4, 8]),
        ((100, "power", 2, 25, 11), 11, [2, 4, 8, 16]),
    ],
)
def test_the_sizes_that_are_tried(arguments: tuple[Any, ...], found: int, sizes: list[int]) -> None:  # L-06
    assert _search(*arguments) == (found, sizes)
    with pytest.raises(ConfigurationError, match="batch size 1 fits"):
        _search(0, *arguments[1:])


class LimitedNet(Net):
    def _check_memory(self, batch: Any) -> Any:
        if len(batch[0]) > 13:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self._check_memory(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._check_memory(batch)

    def train_dataloader(self) -> Any:
        return loader(30, batch_size=self.batch_size)


def test_the_found_size_is_set_where_the_loaders_read_it() -> None:  # L-06
    module, data = LimitedNet(), Data(30)
    assert Tuner(quiet()).scale_batch_size(module, datamodule=data, mode="binsearch", init_val=8) == 13
    assert (data.batch_size, module.batch_size) == (13, 13)
    module = LimitedNet()
    assert Tuner(quiet()).scale_batch_size(module, init_val=8) == module.batch_size == 8
    given, five = loader(30), np.int64(5)
    assert Tuner(quiet()).scale_batch_size(LimitedNet(), given, init_val=five) == 10  # type: ignore[arg-type]
    assert given.batch_size == given.batch_sampler.batch_size == 4


def test_a_size_is_found_for_evaluation() -> None:  # L-06
    options: dict[str, Any] = {"method": "validate", "init_val": 4}
    assert Tuner(quiet()).scale_batch_size(LimitedNet(), datamodule=Data(30), **options) == 8
    assert Tuner(quiet()).scale_batch_size(LimitedNet(), dataloaders=loader(7), **options) == 7  # all samples


@pytest.mark.parametrize(
    ("settings", "loaders", "mode", "found"),
    [
        ({}, loader(11), "power", 11),
        ({}, loader(11, drop_last=True), "binsearch", 11),
        ({"limit_train_batches": 0.1}, loader(100), "power", 8),  # a tenth of 7 batches, of 16 samples, is no batch
    ],
)
def test_the_data_set_is_the_limit(settings: Any, loaders: Any, mode: Any, found: int, caplog: Any) -> None:  # L-06
    caplog.set_level("INFO", "drivetrain")
    assert Tuner(quiet(**settings)).scale_batch_size(Net(), loaders, mode=mode, init_val=4) == found
    assert ("which is the number of samples that a rank has" in caplog.text) == (mode == "power" and found == 11)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(10):
            yield torch.zeros(4, FEATURES), torch.zeros(4, 1)


class ConstantData(Data):
    """Does not use its batch size."""

    def train_dataloader(self) -> Any:
        return loader(60, 32)


SAMPLES = loader(8).dataset
OWN_BATCHES = DataLoader(SAMPLES, batch_sampler=BatchSampler(SequentialSampler(SAMPLES), 2, False))


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        (DataLoader(Stream(), batch_size=None), {}, "DataLoader of Stream without a batch_size"),
        (OWN_BATCHES, {}, "with a custom batch_sampler"),
        ([loader(), loader()], {}, "of a list, passed to fit, cannot be changed"),
        (Data(), {"batch_arg_name": "size"}, "no attribute 'size'"),
        (ConstantData(), {}, "batch_size=2, but the first batch holds 32 samples"),
        (loader(), {"mode": "cubic"}, "cubic"),
        (loader(), {"init_val": 0}, "init_val"),
        (loader(), {"max_trials": 0}, "max_trials"),
        (loader(), {"steps_per_trial": 0}, "steps_per_trial"),
        (loader(), {"method": "fits"}, "fits"),
    ],
)
def test_a_size_that_cannot_be_changed_is_refused(source: Any, options: dict[str, Any], named: str) -> None:  # L-06
    where = "datamodule" if isinstance(source, Data) else "train_dataloaders"
    with pytest.raises(ConfigurationError, match=named):
        Tuner(quiet()).scale_batch_size(Net(), **{where: source}, **options)


def test_other_errors_than_out_of_memory_are_raised() -> None:  # L-06
    class FailingNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Tuner(quiet()).scale_batch_size(FailingNet(), loader())


def test_the_callback_sets_the_size_that_the_run_uses(tmp_path: Path) -> None:  # L-06
    with pytest.raises(ConfigurationError, match="BatchSizeFinder does not work with loaders passed to fit"):
        quiet(callbacks=[BatchSizeFinder()]).fit(Net(), loader())
    finder, data = BatchSizeFinder(mode="binsearch", init_val=8), Data(26)
    fit = quiet(callbacks=[finder])
    fit.fit(LimitedNet(), datamodule=data)
    assert (finder.optimal_batch_size, data.batch_size, fit.global_step) == (13, 13, 2)
    fit.save_checkpoint(tmp_path / "kept")

    resumed, data = BatchSizeFinder(), Data(26)
    fit = quiet(callbacks=[resumed], max_epochs=2)
    fit.fit(Net(), datamodule=data, ckpt_path=tmp_path / "kept", allow=("module",))
    assert (resumed.optimal_batch_size, data.batch_size, fit.global_step) == (13, 13, 4)
    finder, data = BatchSizeFinder(init_val=8), Data(26)
    quiet(callbacks=[finder]).validate(LimitedNet(), datamodule=data, verbose=False)
    assert data.batch_size == 8
