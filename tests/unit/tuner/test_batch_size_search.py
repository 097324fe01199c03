"""The search for a batch size: which sizes are tried, and what becomes of the finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from tuner_case import FEATURES, Data, Net, data, loader, quiet

from drivetrain import ConfigurationError
from drivetrain.callbacks import BatchSizeFinder

# Private: the sizes that are tried, without a run for each.
from drivetrain.callbacks._batch_size_search import search_largest
from drivetrain.tuner import Tuner


def _tried(limit: int, mode: str, init: int, trials: int = 25, most: int | None = None) -> tuple[int, list[int]]:
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= limit

    found = search_largest(fits, mode, init, trials, lambda: most if most is not None and sizes[-1] >= most else None)
    return found, sizes


@pytest.mark.parametrize(
    ("limit", "mode", "init", "found", "sizes"),
    [
        (13, "power", 2, 8, [2, 4, 8, 16]),
        (13, "power", 50, 12, [50, 25, 12]),
        (13, "binsearch", 2, 13, [2, 4, 8, 16, 12, 14, 13]),
        (13, "binsearch", 50, 13, [50, 25, 12, 18, 15, 13, 14]),
        (1, "power", 2, 1, [2, 1]),
        (1, "binsearch", 4, 1, [4, 2, 1]),
    ],
)
def test_the_sizes_that_are_tried(limit: int, mode: str, init: int, found: int, sizes: list[int]) -> None:  # L-06
    assert _tried(limit, mode, init) == (found, sizes)


def test_the_largest_of_those_that_were_tried_counts() -> None:  # L-06
    assert _tried(10**9, "power", 2, trials=3) == (8, [2, 4, 8])
    assert _tried(100, "power", 2, most=11) == (11, [2, 4, 8, 16])
    with pytest.raises(ConfigurationError, match="batch size 1 fits"):
        _tried(0, "power", 4)


class Hungry(Net):
    """Has no memory for more than thirteen samples at once."""

    def _feed(self, batch: Any) -> Any:
        if len(batch[0]) > 13:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self._feed(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._feed(batch)

    def train_dataloader(self) -> Any:
        return loader(60, self.batch_size)


def test_the_found_size_is_set() -> None:  # L-06
    module, own = Hungry(), Data(60)
    assert Tuner(quiet()).scale_batch_size(module, datamodule=own, mode="binsearch") == 13
    assert (own.batch_size, module.batch_size) == (13, 13)
    module = Hungry()
    assert Tuner(quiet()).scale_batch_size(module) == module.batch_size == 8
    given = loader(60)
    assert Tuner(quiet()).scale_batch_size(Hungry(), given, mode="binsearch") == 13
    assert given.batch_size == given.batch_sampler.batch_size == 4
    own = Data(60)
    own.hparams["size"] = 3
    five: Any = np.int64(5)
    assert Tuner(quiet()).scale_batch_size(Hungry(), loader(60), init_val=five) == 10


def test_a_size_is_found_for_evaluation() -> None:  # L-06
    own = Data(60)
    assert Tuner(quiet()).scale_batch_size(Hungry(), datamodule=own, method="validate", mode="binsearch") == 13
    assert Tuner(quiet()).scale_batch_size(Hungry(), dataloaders=loader(60), method="validate") == 8
    assert Tuner(quiet()).scale_batch_size(Hungry(), dataloaders=loader(7), method="validate") == 7


def test_the_data_set_is_the_limit(caplog: pytest.LogCaptureFixture) -> None:  # L-06
    caplog.set_level("INFO", "drivetrain")
    assert Tuner(quiet()).scale_batch_size(Net(), loader(11)) == 11
    assert "which is the number of samples that a rank has" in caplog.text
    assert Tuner(quiet()).scale_batch_size(Net(), loader(11, drop_last=True), mode="binsearch") == 11
    # A tenth of 7 batches, of 16 samples, is no batch.
    assert Tuner(quiet(limit_train_batches=0.1)).scale_batch_size(Net(), loader(100)) == 8


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(10):
            yield torch.zeros(4, FEATURES), torch.zeros(4, 1)


class IgnoresItsSize(Data):
    """Does not go by its batch size."""

    def train_dataloader(self) -> Any:
        return loader(60, 32)


OWN_BATCHES = DataLoader(data(8), batch_sampler=BatchSampler(SequentialSampler(data(8)), 2, False))


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        (DataLoader(Stream(), batch_size=None), {}, "DataLoader of Stream without a batch_size"),
        (OWN_BATCHES, {}, "with a custom batch_sampler"),
        ([loader(), loader()], {}, "of a list, passed to fit, cannot be changed"),
        (Data(), {"batch_arg_name": "size"}, "no attribute 'size'"),
        (IgnoresItsSize(), {}, "batch_size=2, but the first batch holds 32 samples"),
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


def test_the_callback_needs_loaders_of_the_module_or_of_a_data_module() -> None:  # L-06
    with pytest.raises(ConfigurationError, match="BatchSizeFinder does not work with loaders passed to fit"):
        quiet(callbacks=[BatchSizeFinder()]).fit(Net(), loader())


def test_other_errors_than_out_of_memory_are_raised() -> None:  # L-06
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Tuner(quiet()).scale_batch_size(Failing(), loader())


def test_the_callback_sets_the_size_that_the_fit_uses(tmp_path: Path) -> None:  # L-06
    finder, own = BatchSizeFinder(mode="binsearch"), Data(26)
    fit = quiet(callbacks=[finder])
    fit.fit(Hungry(), datamodule=own)
    assert (finder.optimal_batch_size, own.batch_size, fit.global_step) == (13, 13, 2)
    fit.save_checkpoint(tmp_path / "kept")

    later, own = BatchSizeFinder(), Data(26)
    fit = quiet(callbacks=[later], max_epochs=2)
    fit.fit(Net(), datamodule=own, ckpt_path=tmp_path / "kept", allow=("module",))
    assert (later.optimal_batch_size, own.batch_size, fit.global_step) == (13, 13, 4)
    finder, own = BatchSizeFinder(), Data(26)
    quiet(callbacks=[finder]).validate(Hungry(), datamodule=own, verbose=False)
    assert own.batch_size == 8
