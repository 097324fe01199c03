"""Reads what `PredictionWriter` has written."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, overload

from drivetrain.checkpoint._format.documents import decode, loads
from drivetrain.checkpoint._format.folder import Folder, folder_at, read_if_there
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.tensor_reader import CheckedFile, TensorSource, damaged, tensors_in
from drivetrain.data._prediction_files import (
    MANIFEST,
    MAX_DOCUMENT_BYTES,
    START_DOCUMENT,
    Entry,
    Part,
    decode_part_index,
    describe_errors_as_predictions,
    parse_document,
    records_in,
)
from drivetrain.data._sample_rows import Layout, joined, joined_layout, layout_of, rows_of, sample_of
from drivetrain.errors import CheckpointError, ConfigurationError

_KEPT = 16  # batches, and parts, that are kept: neighbours are mostly read one after the other

Found = TypeVar("Found")


def read_predictions(path: str | os.PathLike[str], dataloader_idx: int | None = None) -> Predictions:
    """Open what a `PredictionWriter` has written. Nothing but its indices is read until it is asked for.

    Args:
        path: as the writer was given it: a path or an fsspec URL.
        dataloader_idx: which loader's predictions, where there were several.

    Raises:
        CheckpointError: nothing is there, it is not whole yet, or it is damaged; names the file.
        ConfigurationError: there were several loaders and none is named, or the one that is named is not there.
    """
    folder, parts, loaders, files, block = _opened(os.fspath(path))
    if dataloader_idx is None and loaders > 1:
        raise ConfigurationError(
            f"{folder.path!r} holds the predictions for {loaders} loaders.",
            "each has its own order.",
            "name one: read_predictions(path, dataloader_idx=0).",
        )
    if not 0 <= (dataloader_idx or 0) < loaders:
        raise ConfigurationError(
            f"read_predictions(dataloader_idx={dataloader_idx!r})",
            f"{folder.path!r} holds the predictions for {loaders} loader(s).",
            f"give a number from 0 to {loaders - 1}.",
        )
    return Predictions(folder, parts, files, block, dataloader_idx or 0)


class _Place(NamedTuple):
    """Where an output is."""

    part: Part
    number: int
    entry: Entry


class _Run(NamedTuple):
    """Samples that follow each other in an output."""

    place: int
    row: int
    length: int


class Predictions(Sequence[Any]):
    """The prediction for each sample, in data-set order; each is read, and checked, when it is asked for.

    ``predictions[i]`` is what ``predict_step`` returned for the i-th sample, in the same structure: of a tensor of
    shape (n, ...) the row of shape (...). ``list(predictions)`` reads all of them. Samples without indices (of an
    iterable data set) come in the order of `batches`.

    Args:
        folder: where they are.
        parts: what they consist of.
        files: what is known of each file.
        block: bytes of a block that has a checksum.
        loader: whose they are.
    """

    def __init__(
        self, folder: Folder, parts: Sequence[Part], files: dict[str, FileRecord], block: int, loader: int
    ) -> None:
        self.path = folder.path
        self._folder = folder
        self._records = files
        self._block = block
        places = [
            _Place(part, number, entry)
            for part in parts
            for number, entry in enumerate(part.entries)
            if entry.loader == loader
        ]
        places.sort(key=_in_order)
        self._places = places
        runs = [
            (first, place, row, count)
            for place, (_, _, entry) in enumerate(places)
            for first, row, count in _consecutive(entry)
        ]
        if all(place.entry.runs is not None for place in places):
            runs.sort()
        else:
            runs.sort(key=lambda run: run[1])
        self._firsts = [first for first, *_ in runs]
        self._runs = [_Run(place, row, count) for _, place, row, count in runs]
        self._ends = list(accumulate(run.length for run in self._runs))
        self._layout: Layout = None
        self._outputs: _Recent[Any] = _Recent()
        self._values: _Recent[list[Any]] = _Recent()
        self._tensors: _Recent[dict[str, TensorSource]] = _Recent()

    @property
    def indices(self) -> list[int] | None:
        """The index in the data set of each sample, ascending; None where samples have none."""
        if any(place.entry.runs is None for place in self._places):
            return None
        firsts = zip(self._firsts, self._runs, strict=True)
        return [index for first, run in firsts for index in range(first, first + run.length)]

    def batches(self) -> Iterator[Any]:
        """Yield what ``predict_step`` returned for each micro-batch, as it returned it, by the first of their samples.

        Where samples have no indices, by micro-batch and then rank. A run on another number of ranks has other batches.
        """
        for place in range(len(self._places)):
            yield self._read(place)

    def together(self) -> Any:
        """Return all predictions as one, in the structure of a batch's: tensors of shape (N, ...), in data-set order.

        Raises:
            CheckpointError: they do not fit together; `batches` gives them one by one.
        """
        if not self._runs:
            return None
        layout = self._how()
        begins = list(accumulate((place.entry.samples for place in self._places), initial=0))
        order = [begins[run.place] + row for run in self._runs for row in range(run.row, run.row + run.length)]
        try:
            whole = joined([self._read(place) for place in range(len(self._places))], layout)
            return whole if order == sorted(order) else rows_of(whole, joined_layout(layout), order)
        except (ValueError, KeyError) as error:
            raise self._no_samples(str(error)) from error

    def __len__(self) -> int:
        """How many samples there are."""
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return the prediction for the sample at that place in data-set order, or a list of several."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prediction {index} of {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        run = self._runs[number]
        before = self._ends[number] - run.length
        layout, output = self._how(), self._output(run.place)
        try:
            return sample_of(output, layout, run.row + index - before)
        except (ValueError, KeyError, IndexError) as error:
            raise self._no_samples(str(error)) from error

    def _how(self) -> Layout:
        """How outputs fall apart: as the largest batch's does, of which one can tell best."""
        if self._layout is None:
            place = max(range(len(self._places)), key=lambda number: self._places[number].entry.samples)
            samples = self._places[place].entry.samples
            self._layout = layout_of(self._output(place), samples)
            if self._layout is None:
                raise self._no_samples(
                    f"in a batch of {samples} samples not every tensor and list has {samples} entries"
                )
        return self._layout

    def _no_samples(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"The predictions {self.path!r} are not one for each sample: {why}.",
            "tensors are cut along their first dimension, and lists have an entry for each sample.",
            "read what predict_step returned batch by batch: read_predictions(path).batches().",
        )

    def _output(self, place: int) -> Any:
        return self._outputs.get(place, lambda: self._read(place))

    def _read(self, place: int) -> Any:
        part, number, _ = self._places[place]
        with describe_errors_as_predictions(self.path):
            values = self._values.get(part.stem, lambda: self._values_of(part))
            tensors = self._tensors.get(part.stem, lambda: self._tensors_of(part))
            try:
                return decode(values[number], lambda name: tensors[name].read())
            except (KeyError, IndexError, ValueError) as error:
                raise damaged(self.path, f"{part.values} cannot be read: {type(error).__name__}: {error}") from error

    def _values_of(self, part: Part) -> list[Any]:
        file = self._file(part.values)
        values = loads(file.read(0, file.size), part.values)
        if not isinstance(values, list):
            raise damaged(self.path, f"{part.values} is no list")
        return values

    def _tensors_of(self, part: Part) -> dict[str, TensorSource]:
        return tensors_in(self._file(part.tensors)) if part.tensors in part.files else {}

    def _file(self, name: str) -> CheckedFile:
        return CheckedFile(self._folder, name, self._records[name], self._block)


class _Recent(OrderedDict[Hashable, Found]):
    """The last few things that were read."""

    def get(self, key: Hashable, read: Callable[[], Found]) -> Found:  # type: ignore[override]
        """Return what is kept, or read it."""
        if key not in self:
            self[key] = read()
            if len(self) > _KEPT:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


def _in_order(place: _Place) -> tuple[int, int, int]:
    entry = place.entry
    return (min(entry.runs)[0] if entry.runs else entry.batch, entry.batch, entry.rank)


def _consecutive(entry: Entry) -> Iterator[tuple[int, int, int]]:
    """Yield the first index, the first row and the length of each run of consecutive indices."""
    row = 0
    for first, count in ((0, entry.samples),) if entry.runs is None else entry.runs:
        yield first, row, count
        row += count


def _opened(path: str) -> tuple[Folder, list[Part], int, dict[str, FileRecord], int]:
    with describe_errors_as_predictions(path):
        folder = folder_at(path)
        document = parse_document(_manifest(folder), MANIFEST, path)
        records = records_in(document)
        block = int(document["block_size"])
        parts = []
        for stem in document["parts"]:
            name = f"{stem}.index.json"
            file = CheckedFile(folder, name, records[name], block)
            parts.append(decode_part_index(stem, bytes(file.read(0, file.size)), path))
        return folder, parts, len(document["identity"]["data"]), records, block


def _is_there(folder: Folder, name: str) -> bool:
    try:
        folder.open(name)
    except OSError:
        return False
    return True


def _manifest(folder: Folder) -> bytes:
    content = read_if_there(folder, MANIFEST, MAX_DOCUMENT_BYTES)
    if content is not None:
        return content
    if not _is_there(folder, START_DOCUMENT):
        raise CheckpointError(
            f"There are no predictions at {folder.path!r}.",
            f"it holds neither {MANIFEST} nor {START_DOCUMENT}.",
            "check the path.",
        )
    raise CheckpointError(
        f"The predictions {folder.path!r} are not whole: {MANIFEST} is missing.",
        "it is written last; a run is still at it, or was killed.",
        "wait for it, or call predict once more with the same weights and data: it goes on where that one ended.",
    )
