"""Reads the predictions that a `PredictionWriter` has written."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from drivetrain._data.prediction_files import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    OUTPUTS,
    Part,
    describe_errors_as_predictions,
    parse_manifest,
    parts_among,
    records_from_json,
    samples_in_part,
)
from drivetrain._format.checkpoint_folder import existing_folder, read_if_there
from drivetrain._format.documents import decode, loads
from drivetrain._format.manifest import FileRecord
from drivetrain._format.tensor_reader import CheckedFile, TensorSource, damage_error, tensors_in
from drivetrain._storage.folder import Folder
from drivetrain.data._sample_rows import Layout, layout_of, sample_of
from drivetrain.errors import CheckpointError, ConfigurationError

# Number of outputs, and number of parts, that are cached, because neighbouring samples are mostly read consecutively.
_CACHE_SIZE = 16


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
    folder, files, loaders, block = _open_folder(os.fspath(path))
    number = (0 if loaders == 1 else -1) if dataloader_idx is None else dataloader_idx
    if not 0 <= number < loaders:
        raise ConfigurationError(
            f"read_predictions(dataloader_idx={dataloader_idx!r}).",
            f"{folder.path!r} holds the predictions for {loaders} loader(s), each in its own order.",
            f"give a number from 0 to {loaders - 1}.",
        )
    return Predictions(folder, files, block, number)


class _Output(NamedTuple):
    """A stored output.

    Attributes:
        part: the part that stores the output.
        number: the number of the output within the part.
        samples: the number of samples of the output.
        indices: the data-set indices of the samples; None if samples have no indices.
    """

    part: Part
    number: int
    samples: int
    indices: Tensor | None


class Predictions(Sequence[Any]):
    """A sequence with one prediction per sample, in data-set order. A prediction is read and verified when accessed.

    ``predictions[i]`` is what ``predict_step`` returned for the i-th sample, in the same structure. Of a tensor of
    shape (n, ...), it contains the sample's row of shape (...). ``list(predictions)`` reads all predictions. Samples
    without indices (of an iterable data set) are in the order of `batches`.

    Args:
        folder: the folder of the predictions.
        files: the record of each part's file, by name.
        block: the size in bytes of the blocks that have checksums.
        loader: the number of the loader whose predictions are read.
    """

    def __init__(self, folder: Folder, files: dict[str, FileRecord], block: int, loader: int) -> None:
        self.path = folder.path
        self._folder = folder
        self._records = files
        self._block = block
        outputs = [
            output for part in parts_among(list(files)) if part.loader == loader for output in self._outputs_in(part)
        ]
        self._has_indices = all(output.indices is not None for output in outputs)
        outputs.sort(key=self._sort_key)
        self._outputs = outputs
        self._ends = list(accumulate(output.samples for output in outputs))
        indices = [output.indices for output in outputs if output.indices is not None]
        samples = self._ends[-1] if outputs else 0
        # The samples are numbered in the order of the outputs. `_order` contains their numbers in data-set order.
        keys = torch.cat(indices) if indices and self._has_indices else torch.arange(samples)
        self._indices, self._order = torch.sort(keys, stable=True)
        self._output = lru_cache(_CACHE_SIZE)(self._read)
        self._open_part = lru_cache(_CACHE_SIZE)(self._open)

    @property
    def indices(self) -> list[int] | None:
        """The data-set index of each sample, ascending; None if samples have no indices."""
        return self._indices.tolist() if self._has_indices else None

    def batches(self) -> Iterator[Any]:
        """Yield what ``predict_step`` returned for each micro-batch, ordered by each micro-batch's smallest index.

        If samples have no indices, the order is by micro-batch and then by rank. The micro-batches depend on the number
        of ranks that wrote the predictions.
        """
        for number in range(len(self._outputs)):
            yield self._read(number)

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
        sample = int(self._order[index])
        number = bisect_right(self._ends, sample)
        layout, output = self._layout, self._output(number)
        try:
            return sample_of(output, layout, sample - self._ends[number] + self._outputs[number].samples)
        except (ValueError, KeyError, IndexError) as error:
            raise self._not_per_sample_error(str(error)) from error

    @cached_property
    def _layout(self) -> Layout:
        """How outputs are split by sample, as determined from the largest and thus least ambiguous batch."""
        number = max(range(len(self._outputs)), key=lambda number: self._outputs[number].samples)
        samples = self._outputs[number].samples
        layout = layout_of(self._output(number), samples)
        if layout is None:
            raise self._not_per_sample_error(
                f"in a batch of {samples} samples, not every tensor and list has {samples} entries"
            )
        return layout

    def _not_per_sample_error(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"The predictions {self.path!r} cannot be split by sample: {why}.",
            "tensors are split along their first dimension, and lists need an entry for each sample.",
            "read what predict_step returned batch by batch: read_predictions(path).batches().",
        )

    def _read(self, number: int) -> Any:
        part, position, *_ = self._outputs[number]
        with describe_errors_as_predictions(self.path):
            try:
                values, tensors = self._open_part(part)
                return decode(values[position], lambda name: tensors[name].read())
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise damage_error(self.path, f"{part.name} cannot be read: {type(error).__name__}: {error}") from error

    def _open(self, part: Part) -> tuple[list[Any], dict[str, TensorSource]]:
        tensors = tensors_in(self._file(part.name))
        return loads(tensors[OUTPUTS].read().numpy().tobytes(), part.name), tensors

    def _outputs_in(self, part: Part) -> Iterator[_Output]:
        with describe_errors_as_predictions(self.path):
            samples = samples_in_part(self._file(part.name), self.path)
        begin = 0
        for number, end in enumerate(samples.ends):
            yield _Output(part, number, end - begin, samples.indices_of(number))
            begin = end

    def _sort_key(self, output: _Output) -> tuple[int, int, int]:
        batch, first = output.part.batch + output.number, 0
        if self._has_indices and output.indices is not None and output.samples:
            first = int(output.indices.min())
        return first, batch, output.part.rank

    def _file(self, name: str) -> CheckedFile:
        return CheckedFile(self._folder, name, self._records[name], self._block)


def _open_folder(path: str) -> tuple[Folder, dict[str, FileRecord], int, int]:
    with describe_errors_as_predictions(path):
        folder = existing_folder(path)
        content = read_if_there(folder, MANIFEST, MAX_MANIFEST_BYTES)
        if content is None:
            raise CheckpointError(f"there are none, because it does not contain {MANIFEST}.")
        manifest = parse_manifest(content, path)
    if "files" not in manifest:
        raise CheckpointError(
            f"The predictions {path!r} are incomplete.",
            f"{MANIFEST} lists no files yet: the run is still writing predictions, or was killed.",
            "wait for the run to end, or call predict again with the same weights, data, batches and number of ranks, "
            "which continues the writing.",
        )
    return folder, records_from_json(manifest["files"]), len(manifest["identity"]["data"]), manifest["block_size"]
