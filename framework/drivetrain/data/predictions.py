"""Reads the predictions that a `PredictionWriter` has written."""

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
from drivetrain.checkpoint._format.tensor_reader import CheckedFile, TensorSource, damage_error, tensors_in
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
from drivetrain.data._sample_rows import Layout, concatenate, concatenated_layout, layout_of, rows_of, sample_of
from drivetrain.errors import CheckpointError, ConfigurationError

# Number of outputs, and number of parts, that are cached, because neighbouring samples are mostly read consecutively.
_CACHE_SIZE = 16

Cached = TypeVar("Cached")


def read_predictions(path: str | os.PathLike[str], dataloader_idx: int | None = None) -> Predictions:
    """Open the predictions that a `PredictionWriter` has written. Outputs are read when they are accessed.

    Args:
        path: the writer's path or fsspec URL.
        dataloader_idx: the number of the loader; required if there were several loaders.

    Raises:
        CheckpointError: there are no predictions at the path, or they are incomplete or damaged. The error names the
            file.
        ConfigurationError: there were several loaders and ``dataloader_idx`` is None, or there is no such loader.
    """
    folder, parts, loaders, files, block = _open_folder(os.fspath(path))
    if dataloader_idx is None and loaders > 1:
        raise ConfigurationError(
            f"{folder.path!r} holds the predictions for {loaders} loaders.",
            "each loader has its own order.",
            "choose one, for example read_predictions(path, dataloader_idx=0).",
        )
    if not 0 <= (dataloader_idx or 0) < loaders:
        raise ConfigurationError(
            f"read_predictions(dataloader_idx={dataloader_idx!r}) refers to a loader that does not exist.",
            f"{folder.path!r} holds the predictions for {loaders} loader(s).",
            f"give a number from 0 to {loaders - 1}.",
        )
    return Predictions(folder, parts, files, block, dataloader_idx or 0)


class _OutputLocation(NamedTuple):
    """The location of an output.

    Attributes:
        part: the part that stores the output.
        number: the number of the output within the part.
        entry: the entry that identifies the output's batch.
    """

    part: Part
    number: int
    entry: Entry


class _Run(NamedTuple):
    """Samples in consecutive rows of an output.

    Attributes:
        location: the index of the output's `_OutputLocation`.
        row: the first row.
        length: the number of rows.
    """

    location: int
    row: int
    length: int


class Predictions(Sequence[Any]):
    """A sequence with one prediction per sample, in data-set order. A prediction is read and verified when accessed.

    ``predictions[i]`` is what ``predict_step`` returned for the i-th sample, in the same structure. Of a tensor of
    shape (n, ...), it contains the sample's row of shape (...). ``list(predictions)`` reads all predictions. Samples
    without indices (of an iterable data set) are in the order of `batches`.

    Args:
        folder: the folder of the predictions.
        parts: the parts that the manifest names.
        files: the record of each file, by name.
        block: the size in bytes of the blocks that have checksums.
        loader: the number of the loader whose predictions are read.
    """

    def __init__(
        self, folder: Folder, parts: Sequence[Part], files: dict[str, FileRecord], block: int, loader: int
    ) -> None:
        self.path = folder.path
        self._folder = folder
        self._records = files
        self._block = block
        locations = [
            _OutputLocation(part, number, entry)
            for part in parts
            for number, entry in enumerate(part.entries)
            if entry.loader == loader
        ]
        locations.sort(key=_sort_key)
        self._locations = locations
        runs = [
            (first, location, row, count)
            for location, (_, _, entry) in enumerate(locations)
            for first, row, count in _runs_with_rows(entry)
        ]
        if all(location.entry.runs is not None for location in locations):
            runs.sort()
        else:
            runs.sort(key=lambda run: run[1])
        self._first_indices = [first for first, *_ in runs]
        self._runs = [_Run(location, row, count) for _, location, row, count in runs]
        self._ends = list(accumulate(run.length for run in self._runs))
        self._layout: Layout = None
        self._output_cache: _LruCache[Any] = _LruCache()
        self._values_cache: _LruCache[list[Any]] = _LruCache()
        self._tensors_cache: _LruCache[dict[str, TensorSource]] = _LruCache()

    @property
    def indices(self) -> list[int] | None:
        """The data-set index of each sample, ascending; None if samples have no indices."""
        if any(location.entry.runs is None for location in self._locations):
            return None
        firsts = zip(self._first_indices, self._runs, strict=True)
        return [index for first, run in firsts for index in range(first, first + run.length)]

    def batches(self) -> Iterator[Any]:
        """Yield what ``predict_step`` returned for each micro-batch, ordered by each micro-batch's smallest index.

        If samples have no indices, the order is by micro-batch and then by rank. The micro-batches depend on the number
        of ranks that wrote the predictions.
        """
        for location in range(len(self._locations)):
            yield self._read(location)

    def together(self) -> Any:
        """Return all predictions concatenated in data-set order: tensors have shape (N, ...).

        Raises:
            CheckpointError: the outputs cannot be concatenated; `batches` yields them separately.
        """
        if not self._runs:
            return None
        layout = self._get_layout()
        first_rows = list(accumulate((location.entry.samples for location in self._locations), initial=0))
        order = [first_rows[run.location] + row for run in self._runs for row in range(run.row, run.row + run.length)]
        try:
            all_outputs = concatenate([self._read(location) for location in range(len(self._locations))], layout)
            return all_outputs if order == sorted(order) else rows_of(all_outputs, concatenated_layout(layout), order)
        except (ValueError, KeyError) as error:
            raise self._not_per_sample_error(str(error)) from error

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return the prediction for the sample at a position in data-set order, or a list for a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prediction {index} is out of range: there are {len(self)}")
        index %= len(self)
        number = bisect_right(self._ends, index)
        run = self._runs[number]
        run_start = self._ends[number] - run.length
        layout, output = self._get_layout(), self._output(run.location)
        try:
            return sample_of(output, layout, run.row + index - run_start)
        except (ValueError, KeyError, IndexError) as error:
            raise self._not_per_sample_error(str(error)) from error

    def _get_layout(self) -> Layout:
        """Return how outputs are split by sample, as determined from the largest and thus least ambiguous batch."""
        if self._layout is None:
            location = max(range(len(self._locations)), key=lambda number: self._locations[number].entry.samples)
            samples = self._locations[location].entry.samples
            self._layout = layout_of(self._output(location), samples)
            if self._layout is None:
                raise self._not_per_sample_error(
                    f"in a batch of {samples} samples, not every tensor and list has {samples} entries"
                )
        return self._layout

    def _not_per_sample_error(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"The predictions {self.path!r} cannot be split by sample: {why}.",
            "tensors are split along their first dimension, and lists need an entry for each sample.",
            "read what predict_step returned batch by batch: read_predictions(path).batches().",
        )

    def _output(self, location: int) -> Any:
        return self._output_cache.get(location, lambda: self._read(location))

    def _read(self, location: int) -> Any:
        part, number, _ = self._locations[location]
        with describe_errors_as_predictions(self.path):
            values = self._values_cache.get(part.stem, lambda: self._values_of(part))
            tensors = self._tensors_cache.get(part.stem, lambda: self._tensors_of(part))
            try:
                return decode(values[number], lambda name: tensors[name].read())
            except (KeyError, IndexError, ValueError) as error:
                raise damage_error(
                    self.path, f"{part.values} cannot be read: {type(error).__name__}: {error}"
                ) from error

    def _values_of(self, part: Part) -> list[Any]:
        file = self._file(part.values)
        values = loads(file.read(0, file.size), part.values)
        if not isinstance(values, list):
            raise damage_error(self.path, f"{part.values} is not a list")
        return values

    def _tensors_of(self, part: Part) -> dict[str, TensorSource]:
        return tensors_in(self._file(part.tensors)) if part.tensors in part.files else {}

    def _file(self, name: str) -> CheckedFile:
        return CheckedFile(self._folder, name, self._records[name], self._block)


class _LruCache(OrderedDict[Hashable, Cached]):
    """A cache of the most recently used values."""

    def get(self, key: Hashable, read: Callable[[], Cached]) -> Cached:  # type: ignore[override]
        """Return the cached value, or read it."""
        if key not in self:
            self[key] = read()
            if len(self) > _CACHE_SIZE:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


def _sort_key(location: _OutputLocation) -> tuple[int, int, int]:
    entry = location.entry
    return (min(entry.runs)[0] if entry.runs else entry.batch, entry.batch, entry.rank)


def _runs_with_rows(entry: Entry) -> Iterator[tuple[int, int, int]]:
    """Yield the first index, the first row and the length of each run of consecutive indices."""
    row = 0
    for first, count in ((0, entry.samples),) if entry.runs is None else entry.runs:
        yield first, row, count
        row += count


def _open_folder(path: str) -> tuple[Folder, list[Part], int, dict[str, FileRecord], int]:
    with describe_errors_as_predictions(path):
        folder = folder_at(path)
        document = parse_document(_read_manifest(folder), MANIFEST, path)
        records = records_in(document)
        block = int(document["block_size"])
        parts = []
        for stem in document["parts"]:
            name = f"{stem}.index.json"
            file = CheckedFile(folder, name, records[name], block)
            parts.append(decode_part_index(stem, bytes(file.read(0, file.size)), path))
        return folder, parts, len(document["identity"]["data"]), records, block


def _exists(folder: Folder, name: str) -> bool:
    try:
        folder.open(name)
    except OSError:
        return False
    return True


def _read_manifest(folder: Folder) -> bytes:
    content = read_if_there(folder, MANIFEST, MAX_DOCUMENT_BYTES)
    if content is not None:
        return content
    if not _exists(folder, START_DOCUMENT):
        raise CheckpointError(
            f"There are no predictions at {folder.path!r}.",
            f"it contains neither {MANIFEST} nor {START_DOCUMENT}.",
            "check the path.",
        )
    raise CheckpointError(
        f"The predictions {folder.path!r} are incomplete: {MANIFEST} is missing.",
        f"{MANIFEST} is written last; the run is still writing predictions, or was killed.",
        "wait for the run to end, or call predict again with the same weights and data, which continues the writing.",
    )
