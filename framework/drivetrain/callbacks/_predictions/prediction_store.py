"""Stores predictions in parts, and finds the parts that a killed run has written."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.checkpoint._format.checksums import BLOCK, BlockChecksums
from drivetrain.checkpoint._format.folder import as_os_errors, folder_at
from drivetrain.checkpoint._format.local_storage import sync_folder
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.object_file import make_folder
from drivetrain.checkpoint._format.object_storage import put_with_retries
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.checkpoint._format.tensor_reader import CheckedFile
from drivetrain.checkpoint._format.writeback_file import WritebackFile
from drivetrain.data._prediction_files import (
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
from drivetrain.errors import CheckpointError, listed

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
        self._filesystem, root = filesystem_of(path)
        self._root = root.rstrip("/") if self._filesystem is not None else os.path.realpath(root)
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
            CheckpointError: the folder has other contents, or another run is writing to it.
        """
        self._make_folder()
        self._acquire_lock()
        names = self._names()
        foreign = [name for name in names if not is_prediction_file(name)]
        if foreign:
            raise CheckpointError(
                f"{self.path!r} contains {listed(foreign)}, which are not predictions.",
                "predictions need their own folder.",
                "write to another path, or move these files away.",
            )
        if MANIFEST not in names:
            if parts_among(names):
                raise CheckpointError(
                    f"{self.path!r} contains parts of predictions but not {MANIFEST}, which identifies the weights and "
                    "data of the predictions.",
                    "predictions of different weights or data could be mixed up.",
                    "delete the folder, or write to another path.",
                )
            self._write(MANIFEST, [encode_manifest(identity)])
            return False
        with describe_errors_as_predictions(self.path):
            manifest = parse_manifest(folder_at(self.path).read_all(MANIFEST, MAX_MANIFEST_BYTES), self.path)
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
            if identity.get(key) == before.get(key):
                continue
            difference = "" if key == "weights" else f": {_difference(before.get(key), identity.get(key))}"
            raise CheckpointError(
                f"The unfinished predictions {self.path!r} differ in {key}{difference}.",
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
        self._write(part.name, contents)
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
            if self._size(name) != record.size:
                raise CheckpointError(
                    f"Rank 0 does not see the whole file {name} of the predictions {self.path!r}, which another "
                    "rank has written.",
                    "all ranks must write to the same folder.",
                    f"write to a disk that all nodes share, or to an object store; rank 0 is on {os.uname().nodename}.",
                )
        self._write(MANIFEST, [encode_manifest(identity, files)])
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

    def _make_folder(self) -> None:
        if self._filesystem is not None:
            make_folder(self._filesystem, self._root)
            return
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise CheckpointError(
                f"{self.path!r} is a file.",
                "predictions are stored in a folder.",
                "write to another path, or move the file away.",
            )
        os.makedirs(self._root, exist_ok=True)

    def _acquire_lock(self) -> None:
        """Lock the folder against other runs, if the file system supports locks."""
        if self._filesystem is not None:
            return
        lock = os.open(Path(self._root, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # lockf locks belong to the process, so workers forked from a killed process do not hold them.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(lock)
            raise CheckpointError(
                f"Another run is writing predictions to {self.path!r}.",
                "two runs would do the same work twice.",
                "wait for the other run, or write to another path.",
            ) from None
        except OSError:  # the file system does not support locks
            os.close(lock)
            return
        self._lock = lock

    def _names(self) -> list[str]:
        if self._filesystem is None:
            return sorted(os.listdir(self._root))
        with as_os_errors():
            self._filesystem.invalidate_cache()
            try:
                paths = self._filesystem.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _size(self, name: str) -> int | None:
        try:
            if self._filesystem is None:
                return os.stat(Path(self._root, name)).st_size
            with as_os_errors():
                self._filesystem.invalidate_cache()
                return int(self._filesystem.size(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def _write(self, name: str, contents: Sequence[Content]) -> None:
        """Write a file so that other processes see either all of it or nothing."""
        if self._filesystem is None:
            temporary = Path(self._root, f".{name}-{secrets.token_hex(4)}")
            with WritebackFile(temporary) as file:
                file.writelines(contents)
            os.replace(temporary, Path(self._root, name))
            sync_folder(Path(self._root))
            return
        content = b"".join(contents)

        def is_stored() -> bool:
            with suppress(Exception):
                return bool(self._filesystem.cat_file(f"{self._root}/{name}") == content)
            return False

        put_with_retries(self._filesystem, f"{self._root}/{name}", content, is_stored)

    def _remove(self, name: str) -> None:
        with suppress(Exception):  # leftover files are harmless
            if self._filesystem is None:
                os.unlink(Path(self._root, name))
            else:
                self._filesystem.rm_file(f"{self._root}/{name}")


def _difference(then: Any, now: Any) -> str:
    """Describe how two values differ. For lists of dicts, the text names the fields that differ."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        fields = [(name, old[name], new.get(name)) for old, new in zip(then, now, strict=True) for name in old]
        differing = [f"{name} {old!r:.100} then, {new!r:.100} now" for name, old, new in fields if old != new]
        return "; ".join(differing)
    return f"{then!r:.200} then, {now!r:.200} now"


def _file_record(contents: Sequence[Content]) -> FileRecord:
    sums = BlockChecksums()
    for content in contents:
        sums.update(content)
    return FileRecord(sums.size, sums.text())
