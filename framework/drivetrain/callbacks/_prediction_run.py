"""Buffers one run's predictions on each rank, writes them to a `PredictionStore` in parts, and resumes a killed run."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.sampler import BatchSampler

from drivetrain._data.combined import CombinedLoader
from drivetrain._data.order_fingerprint import subset_fingerprint
from drivetrain._data.prediction_files import (
    Part,
    as_integer_indices,
    part_contents,
    records_from_json,
    records_to_json,
)
from drivetrain._data.samplers import len_or_none
from drivetrain._distributed.checksum import checksum_share, stack_on_cpu
from drivetrain._format.collective_errors import run_collectively
from drivetrain._format.documents import encode
from drivetrain._format.tensor_file import check_storable
from drivetrain._loops.outputs import on_host
from drivetrain._runs.identity import class_path
from drivetrain.callbacks._prediction_store import PredictionStore, StoredPart
from drivetrain.errors import CheckpointError
from drivetrain.strategies.strategy import Strategy

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
        self._trainer = trainer
        self._control = control = strategy.control
        self._rank, self._data_rank = strategy.rank, strategy.data_rank
        self._is_data_leader = strategy.is_data_leader
        self._part_bytes = part_bytes
        self._identity = prediction_identity(trainer, module)
        self._together = partial(run_collectively, control, f"Predictions could not be written to {path!r}")
        self.store: PredictionStore = self._together(lambda: PredictionStore(path))
        self._earlier: dict[Part, StoredPart] = {}  # the parts of the killed run, of this rank's batches
        try:
            begun = self._together(lambda: self._rank == 0 and self.store.begin(self._identity))
            self.resumes: bool = control.gather_objects(begun)[0]
            if self.resumes:
                self._earlier = self._together(lambda: self.store.whole_parts(self._data_rank))
        except BaseException:
            self.store.release()
            raise
        self._earlier_parts = list(self._earlier)
        self._records = {part.name: stored.record for part, stored in self._earlier.items()}
        self._part: Part | None = None  # the part of the buffered outputs
        self._samples: list[int] = []
        self._indices: array[int] | None = array("q")
        self._outputs: list[bytes] = []
        self._tensors: dict[str, Tensor] = {}
        self._buffered_bytes = 0
        self._buffered_since = 0.0
        self._batches_seen: dict[int, int] = {}  # by loader

    def is_written(self, batch_idx: int, dataloader_idx: int) -> bool:
        """Return whether the killed run has written a batch.

        Raises:
            CheckpointError: the batch, if it has been read, has other samples than in the killed run.
        """
        self._batches_seen[dataloader_idx] = batch_idx + 1
        number = bisect_right(self._earlier_parts, Part(dataloader_idx, self._data_rank, batch_idx)) - 1
        part = self._earlier_parts[number] if number >= 0 else None
        if part is None or part.loader != dataloader_idx:
            return False
        samples, position = self._earlier[part].samples, batch_idx - part.batch
        if position >= len(samples.ends):
            return False
        indices, stored = as_integer_indices(self._trainer.batch_indices), samples.indices_of(position)
        if indices is not None and stored is not None and list(indices) != stored.tolist():
            raise CheckpointError(
                f"The unfinished predictions {self.store.path!r} have other samples in batch {batch_idx} of rank "
                f"{self._data_rank}: {stored.tolist()!s:.100} then, {list(indices)!s:.100} now.",
                "the sampler draws in another order, so the remaining batches would not be those that are missing.",
                "resume with a sampler that draws in the same order, write to another path, or delete the folder to "
                "start again.",
            )
        return True

    def add(
        self, output: Any, indices: Sequence[Any] | None, samples: int | None, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Buffer an output that the killed run has not written, and write the buffer if it is large enough."""
        if self.is_written(batch_idx, dataloader_idx):
            return
        part = self._part
        if part is not None and (part.loader, part.batch + len(self._samples)) != (dataloader_idx, batch_idx):
            self._flush()  # a part has consecutive batches of one loader
        if self._part is None:
            self._part, self._buffered_since = Part(dataloader_idx, self._data_rank, batch_idx), time.monotonic()
        encoded, tensors = _encoded(output, str(len(self._samples)), batch_idx)
        text = json.dumps(encoded, allow_nan=False).encode()
        integer_indices = as_integer_indices(indices)
        if integer_indices is None:
            self._indices = None
        elif self._indices is not None:
            self._indices.extend(integer_indices)
        self._samples.append(len(indices) if indices is not None else samples or 1)
        self._outputs.append(text)
        self._tensors.update(tensors)
        self._buffered_bytes += len(text) + sum(tensor.nbytes for tensor in tensors.values())
        if self._buffered_bytes >= self._part_bytes or time.monotonic() - self._buffered_since > _MAX_BUFFER_SECONDS:
            self._flush()

    def publish(self) -> None:
        """Write the buffer, and publish the predictions of all ranks. A collective operation."""

        def finish() -> dict[str, Any]:
            if not self._is_data_leader:
                return {}
            self._flush()
            self._check_all_seen()
            return records_to_json(self._records)

        written = self._control.gather_objects(self._together(finish))

        def commit() -> None:
            if self._rank == 0:
                files = {name: record for records in written for name, record in records_from_json(records).items()}
                self.store.publish(self._identity, files)

        self._together(commit)

    def flush_after_failure(self) -> None:
        """Write the buffer after a failure, if possible. Not a collective operation."""
        with suppress(Exception):  # Only the original failure is reported.
            self._flush()

    def _check_all_seen(self) -> None:
        for part, stored in self._earlier.items():
            if part.batch + len(stored.samples.ends) > self._batches_seen.get(part.loader, 0):
                raise CheckpointError(
                    f"The unfinished predictions {self.store.path!r} have more batches of rank {part.rank} than its "
                    f"data: {part.name} begins with batch {part.batch} of loader {part.loader}.",
                    "the killed run used other data.",
                    "delete the folder to start again, or write to another path.",
                )

    def _flush(self) -> None:
        """Write the buffer as a part."""
        if self._part is None:
            return
        contents = part_contents(self._samples, self._indices, self._outputs, self._tensors)
        self._records[self._part.name] = self.store.write(self._part, contents)
        self._part, self._samples, self._indices = None, [], array("q")
        self._outputs, self._tensors, self._buffered_bytes = [], {}, 0


def _encoded(output: Any, name: str, batch_idx: int) -> tuple[Any, dict[str, Tensor]]:
    """Return an output as JSON-able data, and its tensors by names that begin with ``name``.

    Raises:
        CheckpointError: a part of the output cannot be stored. The error names the part.
    """
    tensors: dict[str, Tensor] = {}
    try:
        encoded = encode(on_host(output, fresh_memory=False), tensors, name)
        check_storable(tensors)
    except CheckpointError as error:
        raise CheckpointError(
            f"PredictionWriter cannot store the output of batch {batch_idx}: {error.what}",
            "tensors are stored as safetensors and other values as JSON, which can be read without running code.",
            "return tensors, numbers, strings, or lists, tuples and dicts of them, such as torch.from_numpy(array) "
            "for an array and output._asdict() for a named tuple; or write a subclass of BasePredictionWriter.",
        ) from error
    return encoded, tensors


# What a run must have in common with the killed run that it resumes


def prediction_identity(trainer: RunContext, module: Any) -> dict[str, Any]:
    """Return JSON-serializable values by name, which are equal for runs that make the same predictions. Collective."""
    return {
        "weights": _weights_digest(trainer.strategy),
        "module": class_path(type(module)),
        "precision": trainer.strategy.precision.name,
        "data": [_data_identity(loader) for loader in trainer.evaluated_loaders],
        "limit": repr(trainer.limit_predict_batches),
        "use_distributed_sampler": trainer.use_distributed_sampler,
        "number of ranks": trainer.strategy.data_world_size,
    }


def _weights_digest(strategy: Strategy) -> str:
    """Return a digest of the exact values of all parameters and persistent buffers.

    A collective operation. Each rank computes position-dependent checksums of its shards. Only one number per tensor is
    gathered.

    Args:
        strategy: the strategy that has set up the module.
    """
    headers, sums = [], []
    for name, value in sorted(strategy.model_state().items()):
        shard = strategy.shard_of(value)
        headers.append(f"{name} {tuple(shard.shape)} {shard.dtype}")
        sums.append(checksum_share(shard, strategy.rank))
    total = strategy.control.all_gather(stack_on_cpu(sums)).sum(0).tolist()
    return hashlib.blake2b(repr((headers, total)).encode(), digest_size=16).hexdigest()


def _data_identity(loader: Any) -> dict[str, Any]:
    """Return JSON-serializable values that identify a loader's data, the order of the data and its batches."""
    data = getattr(loader, "dataset", loader)
    batch_sampler = getattr(loader, "batch_sampler", None)
    identity: dict[str, Any] = {
        "class": class_path(type(data)),
        "samples": len_or_none(data),
        "subset": subset_fingerprint(data),
        "batch size": getattr(loader if batch_sampler is None else batch_sampler, "batch_size", None),
    }
    if isinstance(loader, CombinedLoader):
        identity |= {"mode": loader.mode, "loaders": [_data_identity(part) for part in loader.flattened]}
    if isinstance(loader, DataLoader):
        sampler: Any = loader.sampler if batch_sampler is None else batch_sampler
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        # With either of these samplers, predict uses the order of the dataset.
        draws_once = not getattr(inner, "replacement", False)
        uses_dataset_order = type(inner) in (SequentialSampler, RandomSampler) and draws_once
        identity["order"] = "of the data set" if uses_dataset_order else class_path(type(inner))
        identity["drawn samples"] = len_or_none(inner)
    return identity
