"""Stores predictions in parts, and finds the parts that a killed run has written."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from drivetrain._data.prediction_files import (
    LOCK,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Content,
    Part,
    PartSamples,
    describe_errors_as_predictions,
    encode_manifest,
    is_prediction_file,
    is_whole_part,
    parse_manifest,
    parts_among,
    samples_in_part,
)
from drivetrain._format.checksums import BLOCK
from drivetrain._format.file_writer import BlockChecksums
from drivetrain._format.manifest import FileRecord
from drivetrain._format.tensor_reader import CheckedFile
from drivetrain._storage.paths import folder_at, local_path
from drivetrain._storage.publication import lock_for_this_process
from drivetrain.errors import CheckpointError

logger = logging.getLogger("drivetrain")


class StoredPart(NamedTuple):
    """A part that is stored as it was written.

    Attributes:
        record: the size and the checksums of the part's file.
        samples: the samples of the part's outputs.
    """

    record: FileRecord
    samples: PartSamples


class PredictionStore:
    """A folder of predictions, on a local disk or in an object store.

    Args:
        path: a path or an fsspec URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._folder = folder_at(path)
        self._lock: int | None = None

    # Start a run, on rank 0 only

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Prepare the folder for writing, or check that a killed run has begun the same predictions there.

        Args:
            identity: a description of the weights, module, data, batches and ranks. It must equal the identity of the
                killed run.

        Returns:
            Whether a killed run has begun these predictions.

        Raises:
            CheckpointError: the folder has other predictions, or another run is writing to it.
        """
        self._folder.make()
        self._acquire_lock()
        names = self._names()
        if MANIFEST not in names:
            if parts_among(names):
                raise CheckpointError(
                    f"{self.path!r} contains parts of predictions but not {MANIFEST}, which identifies the weights and "
                    "data of the predictions.",
                    "predictions of different weights or data could be mixed up.",
                    "delete the folder, or write to another path.",
                )
            self._folder.commit(MANIFEST, [encode_manifest(identity)])
            return False
        with describe_errors_as_predictions(self.path):
            manifest = parse_manifest(self._folder.read(MANIFEST, MAX_MANIFEST_BYTES), self.path)
        if "files" in manifest:
            raise CheckpointError(
                f"{self.path!r} contains complete predictions.",
                "a new prediction would overwrite them.",
                "read them with drivetrain.data.read_predictions; to predict again, write to another path or delete "
                "the folder.",
            )
        self._check_identity(identity, manifest["identity"])
        return True

    def _check_identity(self, identity: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        for key in dict.fromkeys([*identity, *before]):
            then, now = before.get(key), identity.get(key)
            if then != now:
                raise CheckpointError(
                    f"Unfinished predictions {self.path!r} differ in {key}: {then!r:.2000} then, {now!r:.2000} now.",
                    "the remaining batches would not match those that were written.",
                    "resume with the same settings, write to another path, or delete the folder to start again.",
                )

    # Read and write parts, on any rank

    def whole_parts(self, rank: int) -> dict[Part, StoredPart]:
        """Return the parts that a killed run has written for a data rank. A part that has changed since is left out."""
        folder, parts = folder_at(self.path), {}
        for part in parts_among(self._names()):
            if part.rank != rank:
                continue
            source = folder.open(part.name)
            content = memoryview(bytearray(source.size))
            source.fill(0, content)
            if is_whole_part(content):
                record = _file_record([content])
                samples = samples_in_part(CheckedFile(folder, part.name, record, BLOCK), self.path)
                parts[part] = StoredPart(record, samples)
            else:
                logger.warning(
                    "%s of the predictions %r has changed since it was written. Its batches are predicted again.",
                    part.name,
                    self.path,
                )
        return parts

    def write(self, part: Part, contents: Sequence[Content]) -> FileRecord:
        """Write the file of a part, and return its record."""
        self._folder.commit(part.name, contents)
        return _file_record(contents)

    # Publish all parts, on rank 0 only

    def publish(self, identity: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
        """Publish all parts in one step, by writing their records to the manifest.

        Args:
            identity: as passed to `begin`.
            files: the records of the files of all ranks' parts, by name.

        Raises:
            CheckpointError: rank 0 cannot see another rank's part.
        """
        for name, record in files.items():
            if self._folder.sizes([name]).get(name) != record.size:
                raise CheckpointError(
                    f"Rank 0 does not see the whole file {name} of the predictions {self.path!r}, which another "
                    "rank has written.",
                    "all ranks must write to the same folder.",
                    f"write to a disk that all nodes share, or to an object store; rank 0 is on {os.uname().nodename}.",
                )
        self._folder.commit(MANIFEST, [encode_manifest(identity, files)])
        for name in self._names():
            if is_prediction_file(name) and name not in files and name not in (MANIFEST, LOCK):
                self._remove(name)

    def release(self) -> None:
        """Release the lock, so that other runs can write to the folder."""
        if self._lock is not None:
            self._remove(LOCK)
            os.close(self._lock)  # releases the lock
            self._lock = None

    # The folder, its lock and its files

    def _acquire_lock(self) -> None:
        """Lock the folder against other runs, if the file system supports locks."""
        root = local_path(self.path)
        try:
            self._lock = None if root is None else lock_for_this_process(os.path.join(root, LOCK))
        except BlockingIOError:
            raise CheckpointError(
                f"Another run is writing predictions to {self.path!r}.",
                "two runs would do the same work twice.",
                "wait for the other run, or write to another path.",
            ) from None

    def _names(self) -> list[str]:
        try:
            return self._folder.names()
        except FileNotFoundError:  # an object store has no empty folders
            return []

    def _remove(self, name: str) -> None:
        with suppress(OSError):  # leftover files are harmless
            self._folder.remove(name)


def _file_record(contents: Sequence[Content]) -> FileRecord:
    sums = BlockChecksums()
    for content in contents:
        sums.update(content)
    return FileRecord(sums.size, sums.text())
