"""Random numbers in data-loading workers, and their start and end, with real workers."""

from __future__ import annotations

import multiprocessing.util
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from drivetrain._data.loaders import prepare_loader
from drivetrain.errors import ConfigurationError


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        return index, *draw()


class DrawingInBulk(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [self[index] for index in indices]


class DrawingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (draw() for _ in range(6))


def drawn(data: Dataset[Any], rank: int = 0, epochs: Sequence[int] = (0, 1), start: int = 0, **options: Any) -> Any:
    """Return the batches of each epoch, as lists of what each field holds."""
    loader = DataLoader(data, 4, shuffle=isinstance(data, Drawing), **options)
    source = prepare_loader(loader, training=True, rank=rank, world_size=2, seed=3)
    try:
        return [[[part.tolist() for part in batch] for batch, _ in source.epoch(epoch, start)] for epoch in epochs]
    finally:
        source.close()


def draws_in(epochs: Any) -> list[float]:
    """Return what was drawn; of a sample of `Drawing`, not its index."""
    return [round(value, 9) for epoch in epochs for batch in epoch for part in batch[-3:] for value in part]


@pytest.mark.parametrize("data", [Drawing(), DrawingInBulk()], ids=["items", "bulk"])
def test_draws_are_a_function_of_seed_epoch_rank_and_micro_batch(data: Drawing) -> None:  # B-10
    two: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    expected = drawn(data, num_workers=1)
    torch.manual_seed(1234)
    assert drawn(data, **two) == expected
    # After a resume in the middle, and whichever epoch came before.
    assert drawn(data, epochs=(1,), start=2, **two) == [expected[1][2:]]
    assert drawn(data, epochs=(1, 0), num_workers=1, persistent_workers=True) == expected[::-1]
    draws = draws_in(expected + drawn(data, rank=1, num_workers=2))
    assert len(draws) == len(set(draws)) == 2 * 26 * 3


def test_without_workers_a_data_set_draws_from_the_generators_of_the_process() -> None:  # B-18
    random.seed(5)
    expected = [random.random() for _ in range(13)]
    random.seed(5)
    (batches,) = drawn(Drawing(), epochs=(0,))
    assert [value for batch in batches for value in batch[1]] == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_of_an_iterable_data_set_differ_between_ranks_workers_and_epochs(persistent: bool) -> None:  # B-10
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    first = drawn(DrawingStream(), **options)
    torch.manual_seed(77)
    assert drawn(DrawingStream(), **options) == first
    draws = draws_in(first + drawn(DrawingStream(), rank=1, **options))
    assert len(draws) == len(set(draws)) == 2 * 2 * 12 * 3


class Offset(Dataset[int]):
    """Depends on an attribute that its worker_init_fn sets."""

    offset: int

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        info: Any = get_worker_info()
        assert info.dataset is self
        return index + self.offset


def set_offset(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.offset = 100


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_worker_init_fn_gets_the_users_data_set(context: str) -> None:
    loader = DataLoader(Offset(), 3, num_workers=1, worker_init_fn=set_offset, multiprocessing_context=context)
    source = prepare_loader(loader, training=True)
    assert [batch.tolist() for batch, _ in source.epoch(0)] == [[100, 101, 102], [103, 104, 105]]
    source.close()


class Failing(Drawing):
    def __getitem__(self, index: int) -> Any:
        raise ConfigurationError("the file is gone")


def test_an_error_in_a_worker_reaches_the_user_with_its_text() -> None:
    with pytest.raises(Exception, match="the file is gone"):
        drawn(Failing(), num_workers=1)


def workers() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


class Wrapped(DataLoader[Any]):
    """A loader whose ``__iter__`` returns a generator, which hides the workers and has no weak references."""

    def __iter__(self) -> Any:
        return map(tuple, super().__iter__())


@pytest.mark.parametrize("kind", [DataLoader, Wrapped])
@pytest.mark.parametrize("persistent", [False, True])
def test_close_shuts_the_workers_down(persistent: bool, kind: Any) -> None:
    before = workers()
    loader = kind(Drawing(), 2, num_workers=2, persistent_workers=persistent)
    source = prepare_loader(loader, training=True)
    batches = source.epoch(0)
    next(batches)
    assert len(workers() - before) == 2
    source.close()
    for process in multiprocessing.active_children():
        process.join(10 if process.pid not in before else 0)
    assert workers() <= before
    assert len(list(source.epoch(1))) == 13
    source.close()


def test_persistent_workers_stay_between_epochs_and_others_end_with_an_abandoned_epoch() -> None:
    before = workers()
    source = prepare_loader(DataLoader(Drawing(), 2, num_workers=1, persistent_workers=True), training=True)
    list(source.epoch(0))
    first = workers()
    next(source.epoch(1))
    assert workers() == first
    source.close()
    batches = prepare_loader(DataLoader(Drawing(), 2, num_workers=2), training=True).epoch(0)
    next(batches)
    del batches
    assert workers() <= before


def test_a_temporary_folder_with_too_long_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # G-06
    if sys.platform != "linux" or hasattr(multiprocessing.util, "_get_base_temp_dir"):
        pytest.skip("sockets' paths have another limit here, or Python looks after it")
    monkeypatch.delitem(multiprocessing.process.current_process()._config, "tempdir", raising=False)  # type: ignore[attr-defined]
    base = tempfile.mkdtemp(dir="/tmp")

    def use_folder(length: int) -> str:
        folder = os.path.join(base, "x" * (length - len(base) - 1))
        os.mkdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        return folder

    try:
        use_folder(75)
        assert len(drawn(Drawing(), num_workers=1)[0]) == 4
        folder = use_folder(76)
        with pytest.raises(ConfigurationError, match=f"num_workers=1 .*{folder}.* 76 bytes") as caught:
            prepare_loader(DataLoader(Drawing(), 2, num_workers=1), training=True)
        assert "TMPDIR" in caught.value.fix
        prepare_loader(DataLoader(Drawing(), 2), training=True)  # without workers any folder will do
    finally:
        shutil.rmtree(base)
