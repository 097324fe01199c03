"""Random numbers in data-loading workers, with real workers."""

from __future__ import annotations

import multiprocessing.util
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from drivetrain.data._loaders import prepare_loader
from drivetrain.errors import ConfigurationError

Draw = tuple[int, float, float, float]


class Drawing(Dataset[Draw]):
    """Every sample draws from all three generators."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Draw:
        return index, random.random(), float(numpy.random.rand()), float(torch.rand(()))


class DrawingInBulk(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Draw]:
        assert type(indices) is list
        return [self[index] for index in indices]


class DrawingStream(IterableDataset[float]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield float(torch.rand(())), random.random(), float(numpy.random.rand())


def plain(batch: Any) -> list[Any]:
    return [part.tolist() for part in batch]


def drawn(
    data: Dataset[Any],
    workers: int,
    persistent: bool = False,
    rank: int = 0,
    epochs: tuple[int, ...] = (0, 1),
    start: int = 0,
) -> list[list[Any]]:
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers, persistent_workers=persistent)
    source = prepare_loader(loader, training=True, rank=rank, world_size=2, seed=3)
    try:
        return [[plain(batch) for batch, _ in source.epoch(epoch, start)] for epoch in epochs]
    finally:
        source.close()


@pytest.mark.parametrize("data", [Drawing(), DrawingInBulk()], ids=["items", "bulk"])
def test_draws_are_a_function_of_seed_epoch_rank_and_micro_batch(data: Drawing) -> None:
    # B-10
    expected = drawn(data, 1)
    torch.manual_seed(1234)
    assert drawn(data, 2, persistent=True) == expected
    # After a resume in the middle, and whichever epoch came before.
    assert drawn(data, 2, persistent=True, epochs=(1,), start=2) == [expected[1][2:]]
    assert drawn(data, 1, persistent=True, epochs=(1, 0)) == expected[::-1]
    drawn_by_both = [part for epoch in expected + drawn(data, 2, rank=1) for _, *parts in epoch for part in parts]
    draws = [value for part in drawn_by_both for value in part]
    assert len(draws) == len({round(value, 9) for value in draws}) == 2 * 26 * 3


def test_without_workers_draws_come_from_the_generators_of_the_process() -> None:
    # B-10, B-18: as a loop written by hand would.
    random.seed(5)
    expected = [random.random() for _ in range(26)]
    random.seed(5)
    source = prepare_loader(DataLoader(Drawing(), 4), training=True)
    assert [value for batch, _ in source.epoch(0) for value in batch[1].tolist()] == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_of_an_iterable_data_set_differ_between_ranks_workers_and_epochs(persistent: bool) -> None:
    # B-10
    def read(rank: int, workers: int = 2) -> list[list[Any]]:
        loader = DataLoader(DrawingStream(), 3, num_workers=workers, persistent_workers=persistent)
        source = prepare_loader(loader, training=True, rank=rank, world_size=2, seed=3)
        try:
            return [[plain(batch) for batch, _ in source.epoch(epoch)] for epoch in (0, 1)]
        finally:
            source.close()

    first = read(0)
    torch.manual_seed(77)
    assert read(0) == first
    values = [value for epoch in first + read(1) for batch in epoch for part in batch for value in part]
    assert len(values) == 2 * 2 * 12 * 3
    assert len({round(value, 9) for value in values}) == len(values)


class Offset(Dataset[int]):
    """Depends on an attribute that its worker_init_fn sets."""

    offset = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return index + self.offset


def set_offset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Offset
    info.dataset.offset = 100


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_gets_the_users_data_set(context: str) -> None:
    loader = DataLoader(Offset(), 3, num_workers=1, worker_init_fn=set_offset, multiprocessing_context=context)
    source = prepare_loader(loader, training=True)
    assert [batch.tolist() for batch, _ in source.epoch(0)] == [[100, 101, 102], [103, 104, 105]]
    source.close()


def workers_alive() -> int:
    return len(multiprocessing.active_children())


class Wrapped(DataLoader[Any]):
    """A loader whose ``__iter__`` returns a generator, which hides the workers and has no weak references."""

    def __iter__(self) -> Any:
        return map(tuple, super().__iter__())


@pytest.mark.parametrize("kind", [DataLoader, Wrapped])
@pytest.mark.parametrize("persistent", [False, True])
def test_close_shuts_the_workers_down(persistent: bool, kind: Any) -> None:
    before = workers_alive()
    loader = kind(Drawing(), 2, num_workers=2, persistent_workers=persistent)
    source = prepare_loader(loader, training=True)
    batches = source.epoch(0)
    next(batches)
    assert workers_alive() == before + 2
    source.close()
    deadline = time.monotonic() + 10
    while workers_alive() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers_alive() == before
    assert len(list(source.epoch(1))) == 13
    source.close()


def test_persistent_workers_stay_between_epochs_and_others_end_with_an_abandoned_epoch() -> None:
    before = workers_alive()
    source = prepare_loader(DataLoader(Drawing(), 2, num_workers=1, persistent_workers=True), training=True)
    list(source.epoch(0))
    first = {process.pid for process in multiprocessing.active_children()}
    next(source.epoch(1))
    assert {process.pid for process in multiprocessing.active_children()} == first
    source.close()
    batches = prepare_loader(DataLoader(Drawing(), 2, num_workers=2), training=True).epoch(0)
    next(batches)
    del batches
    assert workers_alive() == before


def test_a_temporary_folder_whose_name_is_too_long_for_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # G-06
    if sys.platform != "linux" or hasattr(multiprocessing.util, "_get_base_temp_dir"):
        pytest.skip("sockets' paths have another limit here, or Python looks after it")
    monkeypatch.delitem(multiprocessing.process.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    base = tempfile.mkdtemp(dir="/tmp")
    data: Any = torch.arange(4.0).unsqueeze(1)  # a tensor is a dataset, too
    try:
        for length in (75, 76):
            folder = os.path.join(base, "x" * (length - len(base) - 1))
            os.mkdir(folder)
            monkeypatch.setattr(tempfile, "tempdir", folder)
            if length == 75:
                source = prepare_loader(DataLoader(data, 2, num_workers=1), training=True)
                assert [batch.tolist() for batch, _ in source.epoch(0)] == [[[0.0], [1.0]], [[2.0], [3.0]]]
                source.close()
        with pytest.raises(ConfigurationError, match=f"num_workers=1 .*{folder}.* 76 bytes") as caught:
            prepare_loader(DataLoader(data, 2, num_workers=1), training=True)
        assert "TMPDIR" in caught.value.fix
        prepare_loader(DataLoader(data, 2), training=True)  # without workers any folder will do
    finally:
        shutil.rmtree(base)
