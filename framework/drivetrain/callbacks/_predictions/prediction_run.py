"""One run's predictions on their way to a store: held on each rank until they are enough for a part, then written."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.outputs import on_host
from drivetrain.callbacks._predictions.completed_predictions import PredictedBefore
from drivetrain.callbacks._predictions.data_identity import class_name, facts_of
from drivetrain.callbacks._predictions.prediction_store import PredictionStore
from drivetrain.callbacks._predictions.weights_digest import weights_digest
from drivetrain.checkpoint._format.collective_errors import agreed, tell
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

_SECONDS = 60.0  # after which outputs are written, however few


class WritingPredictions:
    """One run's way of writing to one path. Collective.

    Args:
        path: where.
        trainer: the run.
        module: what predicts.
        part_bytes: of outputs that are held until they are written.
    """

    def __init__(self, path: str, trainer: RunContext, module: Any, part_bytes: int) -> None:
        strategy = trainer.strategy
        self._control = strategy.control
        self._rank, self._data_rank = strategy.rank, strategy.data_rank
        self._speaks = strategy.is_data_leader
        self._part_bytes = part_bytes
        loaders = trainer.evaluated_loaders
        self._identity: dict[str, Any] = {
            "weights": weights_digest(strategy),
            "module": class_name(module),
            "precision": strategy.precision.name,
            "data": [facts_of(loader) for loader in loaders],
            "limit": repr(trainer.limit_predict_batches),
            "dealing": {
                "ranks": strategy.data_world_size,
                "batch_size": [getattr(loader, "batch_size", None) for loader in loaders],
            },
        }
        failing = f"Predictions could not be written to {path!r}"

        def begin() -> tuple[PredictionStore, bool]:
            store = PredictionStore(path)
            try:
                return store, store.begin(self._identity) if self._rank == 0 else False
            except BaseException:
                store.release()
                raise

        self.store, goes_on = agreed(self._control, failing, begin)
        entries = [entry for part, _ in self.store.kept.values() for entry in part.entries]
        self._failing = failing
        self._before, self._token, self.goes_on = _told(self._control, entries, goes_on)
        self._number = 0
        self._entries: list[Entry] = []
        self._values: list[bytes] = []
        self._tensors: dict[str, Tensor] = {}
        self._held = 0
        self._since = 0.0
        self._parts: list[Part] = []
        self._last: dict[int, int] = {}
        self._seen = 0
        self._broken = False

    def sees(self, indices: Sequence[Any] | None, batch_idx: int, dataloader_idx: int) -> bool:
        """Note that this rank has come to a batch; returns whether all of it was written before."""
        numbers = as_integer_indices(indices)
        there = self._before.has(dataloader_idx, batch_idx, self._data_rank, numbers)
        if there:
            self._count(
                dataloader_idx, batch_idx, self._before.samples(dataloader_idx, batch_idx, self._data_rank, numbers)
            )
        return there

    def take(
        self, output: Any, indices: Sequence[Any] | None, samples: int | None, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Hold an output, or what of it was not written before, and write what is held where it is enough."""
        numbers = as_integer_indices(indices)
        count = len(indices) if indices is not None else samples or 1
        self._count(dataloader_idx, batch_idx, count)
        rows = self._before.missing(dataloader_idx, batch_idx, self._data_rank, numbers, count)
        if not rows:
            return
        self._check(output, batch_idx)
        if len(rows) < count:
            layout = layout_of(output, count)
            if layout is None:
                raise CheckpointError(
                    f"{self.store.path!r} cannot be gone on with: a part of batch {batch_idx}, {count} samples, was "
                    "written before, and what predict_step returns does not fall apart by samples.",
                    "it was begun with other batches; tensors are cut along their first dimension, lists by entries.",
                    "go on with as many ranks and the batch size of before, or delete the folder to begin anew.",
                )
            assert numbers is not None
            output, numbers, count = rows_of(output, layout, rows), tuple(numbers[row] for row in rows), len(rows)
        runs = None if numbers is None else index_runs(numbers)
        self._hold(on_host(output, fresh_memory=False), Entry(dataloader_idx, batch_idx, self._data_rank, count, runs))
        if self._held >= self._part_bytes or time.monotonic() - self._since > _SECONDS:
            self._flush()

    def publish(self) -> None:
        """Write what is held, and make all of it predictions. Collective."""
        agreed(self._control, self._failing, self._flush)
        mine = [(part.stem, encode_part_index(part).decode()) for part in self._parts]
        told = tell(self._control, self._failing, (mine, self._seen if self._speaks else 0), None)

        def commit() -> None:
            if self._rank != 0:
                return
            parts = [
                decode_part_index(stem, text.encode(), self.store.path) for of_rank, _ in told for stem, text in of_rank
            ]
            kept = [part for part, _ in self.store.kept.values()]
            written = sum(entry.samples for part in (*kept, *parts) for entry in part.entries)
            seen = sum(count for _, count in told)
            if written != seen:
                raise CheckpointError(
                    f"The predictions {self.store.path!r} are not complete: {written} were written of {seen}.",
                    "the data of the run that was killed were others, or its sampler draws samples more than once.",
                    "delete the folder and predict anew.",
                )
            self.store.publish(self._identity, parts)

        agreed(self._control, self._failing, commit)

    def save_what_is_held(self) -> None:
        """Write what is held after a failure, if it can be written. Not collective."""
        if not self._broken:
            try:
                self._flush()
            except Exception:
                return  # the failure that led here is the one to tell

    def _count(self, loader: int, batch_idx: int, samples: int) -> None:
        # Asked twice where what is there is looked for before reading.
        if batch_idx > self._last.get(loader, -1):
            self._last[loader] = batch_idx
            self._seen += samples

    def _check(self, output: Any, batch_idx: int) -> None:
        problem = _unstorable(output, "predict_step's output")
        if problem is not None:
            raise CheckpointError(
                f"PredictionWriter cannot store batch {batch_idx}: {problem}.",
                "tensors go to safetensors and everything else to JSON, so that reading them can run no code.",
                "return tensors, numbers, strings, or lists, tuples and dicts of them: torch.from_numpy(array) for "
                "an array, found._asdict() for a named tuple; or write a BasePredictionWriter of your own.",
            )

    def _hold(self, output: Any, entry: Entry) -> None:
        if not self._entries:
            self._since = time.monotonic()
        aside: dict[str, Any] = {}
        text = json.dumps(encode(output, aside, str(len(self._entries))), allow_nan=False).encode()
        self._values.append(text)
        self._tensors.update(aside)
        self._entries.append(entry)
        self._held += len(text) + sum(tensor.nbytes for tensor in aside.values())

    def _flush(self) -> None:
        """Write a part of what is held."""
        if not self._entries:
            return
        stem = f"part-{self._rank:05d}-{self._number:06d}-{self._token}"
        self._number += 1
        specs = in_file_order(Spec(name, one.dtype, tuple(one.shape)) for name, one in self._tensors.items())
        tensors: list[bytes | memoryview] = []
        if specs:
            flat = [self._tensors[spec.name].resolve_conj().resolve_neg().reshape(-1) for spec in specs]
            tensors = [header_of(specs), *map(bytes_of, flat)]
        self._broken = True
        self._parts.append(self.store.write(stem, self._entries, tensors, b"[" + b",\n".join(self._values) + b"]\n"))
        self._broken = False
        self._entries, self._values, self._tensors, self._held = [], [], {}, 0


def _told(control: ControlPlane, entries: Sequence[Entry], goes_on: bool) -> tuple[PredictedBefore, str, bool]:
    """Tell every rank what rank 0 has found, and by which token the files of this run go. Collective."""
    said = json.dumps([entries_to_json(entries), secrets.token_hex(8), goes_on]).encode()
    found, token, goes_on = json.loads(control.gather_bytes(said if control.rank == 0 else b"")[0])
    return PredictedBefore(list(entries_from_json(found))), token, goes_on


def _unstorable(value: Any, where: str) -> str | None:
    """What cannot be stored of a value, and why; None where all can."""
    if isinstance(value, Tensor):
        try:
            check_storable(where, value)
        except CheckpointError as error:
            return f"{where} is {error.what.partition(', ')[2].removesuffix('.')}"
        return f"{where} is a tensor spread over the ranks" if hasattr(value, "device_mesh") else None
    if value is None or isinstance(value, bool | int | float | str):
        return None
    if isinstance(value, Mapping):
        parts = [(f"{where}[{key!r}]", part) for key, part in value.items()]
        keys = [_unstorable(key, f"a key of {where}") for key in value]
        return next((one for one in (*keys, *(_unstorable(part, name) for name, part in parts)) if one), None)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        found = (_unstorable(part, f"{where}[{number}]") for number, part in enumerate(value))
        return next((one for one in found if one), None)
    return f"{where} is a {type(value).__name__}"
