"""Stores predictions in parts, and finds the parts that a killed run has written."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from drivetrain.checkpoint._format.checksums import BlockChecksums
from drivetrain.checkpoint._format.eager_file import EagerFile
from drivetrain.checkpoint._format.folder import as_os_errors, folder_at
from drivetrain.checkpoint._format.local_storage import sync_folder
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.object_file import make_folder, open_object
from drivetrain.checkpoint._format.object_storage import put_with_retries
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.data._prediction_files import (
    LOCK,
    MANIFEST,
    MAX_DOCUMENT_BYTES,
    START_DOCUMENT,
    Entry,
    Part,
    decode_part_index,
    describe_errors_as_predictions,
    encode_manifest,
    encode_part_index,
    encode_start_document,
    is_prediction_file,
    parse_document,
    part_stems,
)
from drivetrain.errors import CheckpointError, listed

Content = bytes | memoryview

_LABELS = {"dealing": "ranks or batch sizes"}
"""Descriptions, for error messages, of keys of the identity that are not clear by themselves."""

_RETRY_DELAYS = (0.5, 1.0, 2.0)  # seconds between attempts to upload a file


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
        self._existing_names: list[str] = []
        self.earlier_parts: dict[str, tuple[Part, FileRecord]] = {}
        """On rank 0, the parts of an earlier run and the records of their index files, by the index files' names."""

    # Start a run, on rank 0 only

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Prepare the folder for writing, or find the parts of a killed run.

        Args:
            identity: a description of the weights, module and data. It must equal the identity of the killed run.

        Returns:
            Whether the folder contains parts of a killed run.

        Raises:
            CheckpointError: the folder has other contents, or another run is writing to it.
        """
        self._make_folder()
        self._acquire_lock()
        self._existing_names = names = self._names()
        foreign = [name for name in names if not is_prediction_file(name)]
        if foreign:
            raise CheckpointError(
                f"{self.path!r} contains {listed(foreign)}, which are not predictions.",
                "predictions need their own folder.",
                "write to another path, or move these files away.",
            )
        if MANIFEST in names:
            raise CheckpointError(
                f"{self.path!r} contains complete predictions.",
                "a new prediction would overwrite them.",
                "read them with drivetrain.data.read_predictions; to predict again, write to another path or delete "
                "the folder.",
            )
        if START_DOCUMENT not in names:
            if part_stems(names):
                raise CheckpointError(
                    f"{self.path!r} contains parts of predictions but not {START_DOCUMENT}, which identifies the "
                    "weights and data of the predictions.",
                    "predictions of different weights or data could be mixed up.",
                    "delete the folder, or write to another path.",
                )
            self._write_atomically(START_DOCUMENT, encode_start_document(identity))
            return False
        with describe_errors_as_predictions(self.path):
            self._find_parts(identity, names)
        return True

    def _find_parts(self, identity: Mapping[str, Any], names: Sequence[str]) -> None:
        folder = folder_at(self.path)
        before = parse_document(folder.read_all(START_DOCUMENT, MAX_DOCUMENT_BYTES), START_DOCUMENT, self.path).get(
            "identity", {}
        )
        for stem in part_stems(names):
            content = folder.read_all(f"{stem}.index.json", MAX_DOCUMENT_BYTES)
            with suppress(CheckpointError):  # An incomplete index means that the part was not committed.
                part = decode_part_index(stem, content, self.path)
                if all(self._size(name) == record.size for name, record in part.files.items()):
                    self.earlier_parts[part.index] = part, _file_record([content])
        entries = [entry for part, _ in self.earlier_parts.values() for entry in part.entries]
        self._check_identity(identity, before, entries)

    def _check_identity(self, identity: Mapping[str, Any], before: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        # With limit_predict_batches the distribution over ranks determines which samples are predicted.
        by_rank = identity["limit"] != "None" or any(entry.runs is None for entry in entries)
        for key in dict.fromkeys([*identity, *before]):
            if identity.get(key) == before.get(key) or (key == "dealing" and not by_rank):
                continue
            difference = "" if key == "weights" else f": {_difference(before.get(key), identity.get(key))}"
            raise CheckpointError(
                f"The unfinished predictions {self.path!r} have other {_LABELS.get(key, key)}{difference}.",
                "the remaining predictions would not match those that were written."
                if key != "dealing"
                else "without sample indices, or with limit_predict_batches, these settings determine which samples "
                "remain.",
                "resume with the same settings, write to another path, or delete the folder to start again.",
            )
        repeated = _first_repeated(entries)
        if repeated is not None:
            raise CheckpointError(
                f"{self.path!r} contains several predictions for sample {repeated}.",
                "the sampler draws samples more than once, so the samples that remain cannot be determined.",
                "delete the folder to start again, or write to another path.",
            )

    # Write parts, on any rank

    def write(self, stem: str, entries: Sequence[Entry], tensors: Sequence[Content], values: bytes) -> Part:
        """Write a part. The index file of the part is written last and commits the part.

        Args:
            stem: the unique stem of the part's file names.
            entries: identifiers of the outputs.
            tensors: the contents of a safetensors file in pieces; empty if there are no tensors.
            values: all other values, as JSON.
        """
        part = Part(stem, entries=tuple(entries), files={})
        files = {part.values: _file_record([values])}
        if tensors:
            files[part.tensors] = _file_record(tensors)
            self._write_file(part.tensors, tensors)
        self._write_file(part.values, [values])
        part = Part(stem, tuple(entries), files)
        self._write_file(part.index, [encode_part_index(part)])
        return part

    # Publish all parts, on rank 0 only

    def publish(self, identity: Mapping[str, Any], parts: Sequence[Part]) -> None:
        """Publish all parts in one step, by writing the manifest.

        Args:
            identity: as passed to `begin`.
            parts: the parts of all ranks, without those of an earlier run.

        Raises:
            CheckpointError: rank 0 cannot see another rank's part.
        """
        records = {name: record for name, (_, record) in self.earlier_parts.items()}
        for part in parts:
            index = _file_record([encode_part_index(part)])
            for name, record in {**part.files, part.index: index}.items():
                if self._size(name) != record.size:
                    raise CheckpointError(
                        f"Rank 0 does not see the whole file {name} of the predictions {self.path!r}, which another "
                        "rank has written.",
                        "all ranks must write to the same folder.",
                        "write to a disk that all nodes share, or to an object store; rank 0 is on "
                        f"{os.uname().nodename}.",
                    )
            records[part.index] = index
        all_parts = [part for part, _ in self.earlier_parts.values()] + list(parts)
        self._write_atomically(MANIFEST, encode_manifest(identity, all_parts, records))
        used = {name for part in all_parts for name in (*part.files, part.index)}
        for name in self._existing_names:
            if is_prediction_file(name) and name not in used and name != LOCK:
                self._remove(name)
        self._remove(START_DOCUMENT)

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

    def _write_file(self, name: str, contents: Sequence[Content]) -> None:
        """Write a new file. After a failure, the part's index is not written, so the part does not count."""
        if self._filesystem is None:
            with EagerFile(Path(self._root, name)) as file:
                file.writelines(contents)
            return
        for delay in (*_RETRY_DELAYS, None):
            try:
                with open_object(self._filesystem, f"{self._root}/{name}") as stream:
                    stream.write(b"".join(contents))
                return
            except Exception as error:  # each storage library has its own exceptions
                if delay is None or isinstance(error, PermissionError):
                    raise
            time.sleep(delay)

    def _write_atomically(self, name: str, content: bytes) -> None:
        """Write a document so that other processes see either all of it or nothing."""
        if self._filesystem is None:
            temporary = Path(self._root, f".{name}-{secrets.token_hex(4)}")
            with EagerFile(temporary) as file:
                file.write(content)
            os.replace(temporary, Path(self._root, name))
            sync_folder(Path(self._root))
            return

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


def _first_repeated(entries: Iterable[Entry]) -> int | None:
    """Return the first sample index that occurs twice, or None."""
    runs = sorted((entry.loader, first, first + count) for entry in entries for first, count in entry.runs or ())
    for (loader, _, end), (other, first, _) in pairwise(runs):
        if loader == other and first < end:
            return first
    return None


def _file_record(contents: Sequence[Content]) -> FileRecord:
    sums = BlockChecksums()
    for content in contents:
        sums.update(content)
    return FileRecord(sums.size, sums.text())
