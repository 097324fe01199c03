"""Buffers one run's predictions on each rank and writes them to a `PredictionStore` in parts."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.outputs import on_host
from drivetrain.callbacks._predictions.completed_predictions import CompletedPredictions
from drivetrain.callbacks._predictions.data_identity import class_name, data_identity
from drivetrain.callbacks._predictions.prediction_store import PredictionStore
from drivetrain.callbacks._predictions.weights_digest import weights_digest
from drivetrain.checkpoint._format.collective_errors import gather_or_raise, run_collectively
from drivetrain.checkpoint._format.documents import encode
from drivetrain.checkpoint._format.pieces import bytes_of
from drivetrain.checkpoint._format.tensor_file import Spec, check_storable, header_of, in_file_order
from drivetrain.data._prediction_files import (
    Entry,
    Part,
    as_integer_indices,
    decode_part_index,
    encode_part_index,
    entries_from_json,
    entries_to_json,
    index_runs,
)
from drivetrain.data._sample_rows import layout_of, rows_of
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_MAX_BUFFER_SECONDS = 60.0  # maximum age of a buffered output, checked when another output is added


class PredictionRun:
    """Writes the predictions of one run to one path. Construction is a collective operation.

    Args:
        path: a folder or fsspec URL.
        trainer: the run.
        module: the module that predicts.
        part_bytes: the number of bytes of outputs that are buffered before a part is written.
    """

    def __init__(self, path: str, trainer: RunContext, module: Any, part_bytes: int) -> None:
        strategy = trainer.strategy
        self._control = strategy.control
        self._rank, self._data_rank = strategy.rank, strategy.data_rank
        self._is_data_leader = strategy.is_data_leader
        self._part_bytes = part_bytes
        loaders = trainer.evaluated_loaders
        self._identity: dict[str, Any] = {
            "weights": weights_digest(strategy),
            "module": class_name(module),
            "precision": strategy.precision.name,
            "data": [data_identity(loader) for loader in loaders],
            "limit": repr(trainer.limit_predict_batches),
            "dealing": {
                "ranks": strategy.data_world_size,
                "batch_size": [getattr(loader, "batch_size", None) for loader in loaders],
            },
        }
        failure_message = f"Predictions could not be written to {path!r}"

        def begin() -> tuple[PredictionStore, bool]:
            store = PredictionStore(path)
            try:
                return store, store.begin(self._identity) if self._rank == 0 else False
            except BaseException:
                store.release()
                raise

        self.store, resumes = run_collectively(self._control, failure_message, begin)
        entries = [entry for part, _ in self.store.earlier_parts.values() for entry in part.entries]
        self._failure_message = failure_message
        self._completed, self._token, self.resumes = _broadcast(self._control, entries, resumes)
        self._part_number = 0  # the number of the next part
        self._entries: list[Entry] = []
        self._values: list[bytes] = []
        self._tensors: dict[str, Tensor] = {}
        self._buffered_bytes = 0
        self._buffered_since = 0.0
        self._parts: list[Part] = []
        self._last_batch: dict[int, int] = {}  # the last batch of each loader whose samples are counted
        self._sample_count = 0
        self._write_failed = False

    def check_written(self, indices: Sequence[Any] | None, batch_idx: int, dataloader_idx: int) -> bool:
        """Return whether an earlier run has written all samples of a batch. If so, count these samples."""
        integer_indices = as_integer_indices(indices)
        is_written = self._completed.has(dataloader_idx, batch_idx, self._data_rank, integer_indices)
        if is_written:
            self._count_samples(
                dataloader_idx,
                batch_idx,
                self._completed.samples(dataloader_idx, batch_idx, self._data_rank, integer_indices),
            )
        return is_written

    def add(
        self, output: Any, indices: Sequence[Any] | None, samples: int | None, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Buffer the samples of an output that no earlier run wrote, and write the buffer if it is large enough."""
        integer_indices = as_integer_indices(indices)
        count = len(indices) if indices is not None else samples or 1
        self._count_samples(dataloader_idx, batch_idx, count)
        rows = self._completed.missing(dataloader_idx, batch_idx, self._data_rank, integer_indices, count)
        if not rows:
            return
        self._check(output, batch_idx)
        if len(rows) < count:
            layout = layout_of(output, count)
            if layout is None:
                raise CheckpointError(
                    f"The predictions {self.store.path!r} cannot be resumed: some of the {count} samples of batch "
                    f"{batch_idx} were written before, and the output of predict_step cannot be split by samples.",
                    "the killed run used other batches, and only tensors with the batch size as first dimension and "
                    "lists with one entry for each sample can be split.",
                    "resume with the same number of ranks and batch size, or delete the folder to start again.",
                )
            assert integer_indices is not None
            output = rows_of(output, layout, rows)
            integer_indices = tuple(integer_indices[row] for row in rows)
            count = len(rows)
        runs = None if integer_indices is None else index_runs(integer_indices)
        self._buffer(
            on_host(output, fresh_memory=False), Entry(dataloader_idx, batch_idx, self._data_rank, count, runs)
        )
        if self._buffered_bytes >= self._part_bytes or time.monotonic() - self._buffered_since > _MAX_BUFFER_SECONDS:
            self._flush()

    def publish(self) -> None:
        """Write the buffer, and publish the predictions of all ranks. A collective operation."""
        run_collectively(self._control, self._failure_message, self._flush)
        index_documents = [(part.stem, encode_part_index(part).decode()) for part in self._parts]
        written_by_rank = gather_or_raise(
            self._control,
            self._failure_message,
            (index_documents, self._sample_count if self._is_data_leader else 0),
            None,
        )

        def commit() -> None:
            if self._rank != 0:
                return
            parts = [
                decode_part_index(stem, text.encode(), self.store.path)
                for indices, _ in written_by_rank
                for stem, text in indices
            ]
            earlier = [part for part, _ in self.store.earlier_parts.values()]
            written = sum(entry.samples for part in (*earlier, *parts) for entry in part.entries)
            seen = sum(count for _, count in written_by_rank)
            if written != seen:
                raise CheckpointError(
                    f"The predictions {self.store.path!r} are not complete: {written} of {seen} samples were written.",
                    "the killed run used other data, or its sampler draws samples more than once.",
                    "delete the folder and predict again.",
                )
            self.store.publish(self._identity, parts)

        run_collectively(self._control, self._failure_message, commit)

    def flush_after_failure(self) -> None:
        """Write the buffer after a failure, if possible. Not a collective operation."""
        if not self._write_failed:
            try:
                self._flush()
            except Exception:
                return  # Only the original failure is reported.

    def _count_samples(self, loader: int, batch_idx: int, samples: int) -> None:
        # The loop calls `check_written` before and after it reads a batch, but must count the batch only once.
        if batch_idx > self._last_batch.get(loader, -1):
            self._last_batch[loader] = batch_idx
            self._sample_count += samples

    def _check(self, output: Any, batch_idx: int) -> None:
        problem = _unstorable(output, "predict_step's output")
        if problem is not None:
            raise CheckpointError(
                f"PredictionWriter cannot store batch {batch_idx}: {problem}.",
                "tensors are stored as safetensors and other values as JSON, which can be read without running code.",
                "return tensors, numbers, strings, or lists, tuples and dicts of them, such as torch.from_numpy(array) "
                "for an array and output._asdict() for a named tuple; or write a subclass of BasePredictionWriter.",
            )

    def _buffer(self, output: Any, entry: Entry) -> None:
        if not self._entries:
            self._buffered_since = time.monotonic()
        extracted: dict[str, Any] = {}
        text = json.dumps(encode(output, extracted, str(len(self._entries))), allow_nan=False).encode()
        self._values.append(text)
        self._tensors.update(extracted)
        self._entries.append(entry)
        self._buffered_bytes += len(text) + sum(tensor.nbytes for tensor in extracted.values())

    def _flush(self) -> None:
        """Write the buffer as a part."""
        if not self._entries:
            return
        stem = f"part-{self._rank:05d}-{self._part_number:06d}-{self._token}"
        self._part_number += 1
        specs = in_file_order(Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items())
        tensors: list[bytes | memoryview] = []
        if specs:
            flat = [self._tensors[spec.name].resolve_conj().resolve_neg().reshape(-1) for spec in specs]
            tensors = [header_of(specs), *map(bytes_of, flat)]
        self._write_failed = True
        self._parts.append(self.store.write(stem, self._entries, tensors, b"[" + b",\n".join(self._values) + b"]\n"))
        self._write_failed = False
        self._entries, self._values, self._tensors, self._buffered_bytes = [], [], {}, 0


def _broadcast(
    control: ControlPlane, entries: Sequence[Entry], resumes: bool
) -> tuple[CompletedPredictions, str, bool]:
    """Broadcast from rank 0 the entries, the token of this run's file names, and ``resumes``. Collective."""
    message = json.dumps([entries_to_json(entries), secrets.token_hex(8), resumes]).encode()
    written, token, resumes = json.loads(control.gather_bytes(message if control.rank == 0 else b"")[0])
    return CompletedPredictions(list(entries_from_json(written))), token, resumes


def _unstorable(value: Any, name: str) -> str | None:
    """Return which part of a value cannot be stored, and why; None if the whole value can be stored."""
    if isinstance(value, Tensor):
        try:
            check_storable(name, value)
        except CheckpointError as error:
            return f"{name} is {error.what.partition(', ')[2].removesuffix('.')}"
        return f"{name} is a tensor sharded across ranks" if hasattr(value, "device_mesh") else None
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, Mapping):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
        keys = [_unstorable(key, f"a key of {name}") for key in value]
        return next(filter(None, (*keys, *(_unstorable(part, part_name) for part_name, part in parts))), None)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        problems = (_unstorable(part, f"{name}[{number}]") for number, part in enumerate(value))
        return next(filter(None, problems), None)
    return f"{name} is a {type(value).__name__}"
