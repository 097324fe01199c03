"""Where predictions are written, part by part, and how one goes on where a run was killed."""

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

from drivetrain.checkpoint._format.checksums import BlockSums
from drivetrain.checkpoint._format.eager_file import EagerFile
from drivetrain.checkpoint._format.folder import as_os_errors, folder_at
from drivetrain.checkpoint._format.local_storage import sync_folder
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.object_file import make_folder, put
from drivetrain.checkpoint._format.object_storage import put_surely
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
    encode_part_index,
    encode_start_document,
    is_prediction_file,
    manifest,
    parse_document,
    part_stems,
)
from drivetrain.errors import CheckpointError, listed

Content = bytes | memoryview

_PAUSES = (0.5, 1.0, 2.0)  # seconds between tries to put a file in a store that refuses


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
        self._there: list[str] = []
        self.kept: dict[str, tuple[Part, FileRecord]] = {}
        """The parts of an earlier run, by their indices' names, each with the index's record. On rank 0."""

    # The beginning. Rank 0 only.

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Begin to write, or find what a run that was killed has left; returns whether there was one.

        Args:
            identity: what the predictions are of: the same as theirs, if one goes on.

        Raises:
            CheckpointError: something else is there, or is being written; says what differs, and what to do.
        """
        self._make_folder()
        self._take()
        self._there = names = self._names()
        foreign = [name for name in names if not is_prediction_file(name)]
        if foreign:
            raise CheckpointError(
                f"{self.path!r} holds {listed(foreign)}, which is no part of predictions.",
                "predictions have a folder of their own.",
                "write to another path, or move these files away.",
            )
        if MANIFEST in names:
            raise CheckpointError(
                f"{self.path!r} holds predictions that are whole.",
                "they would be written over.",
                "read them with drivetrain.data.read_predictions; to predict anew write to another path, or delete it.",
            )
        if START_DOCUMENT not in names:
            if part_stems(names):
                raise CheckpointError(
                    f"{self.path!r} holds parts of predictions, and not {START_DOCUMENT}, which says what they are of.",
                    "with other weights or data they would be mixed up.",
                    "delete the folder, or write to another path.",
                )
            self._replace(START_DOCUMENT, encode_start_document(identity))
            return False
        with describe_errors_as_predictions(self.path):
            self._find(identity, names)
        return True

    def _find(self, identity: Mapping[str, Any], names: Sequence[str]) -> None:
        folder = folder_at(self.path)
        before = parse_document(folder.read_all(START_DOCUMENT, MAX_DOCUMENT_BYTES), START_DOCUMENT, self.path).get(
            "identity", {}
        )
        for stem in part_stems(names):
            content = folder.read_all(f"{stem}.index.json", MAX_DOCUMENT_BYTES)
            with suppress(CheckpointError):  # torn: it was not committed
                part = decode_part_index(stem, content, self.path)
                if all(self._size(name) == record.size for name, record in part.files.items()):
                    self.kept[part.index] = part, _record([content])
        entries = [entry for part, _ in self.kept.values() for entry in part.entries]
        self._refuse_others(identity, before, entries)

    def _refuse_others(self, identity: Mapping[str, Any], before: Mapping[str, Any], entries: Iterable[Entry]) -> None:
        # Under a limit it also depends on the dealing which samples there are.
        by_rank = identity["limit"] != "None" or any(entry.runs is None for entry in entries)
        for key in [*dict.fromkeys([*identity, *before])]:
            if identity.get(key) == before.get(key) or (key == "dealing" and not by_rank):
                continue
            difference = "" if key == "weights" else f": {_difference(before.get(key), identity.get(key))}"
            raise CheckpointError(
                f"{self.path!r} holds predictions that were begun with other {key}{difference}.",
                "those that are missing would be of another kind than those that are there."
                if key != "dealing"
                else "where samples have no indices, or under a limit, which of them are missing depends on that.",
                "go on with what it was begun with, write to another path, or delete the folder to begin anew.",
            )
        twice = _first_repeated(entries)
        if twice is not None:
            raise CheckpointError(
                f"{self.path!r} holds several predictions for sample {twice}.",
                "its sampler draws samples more than once, and nobody can tell which of them are missing.",
                "delete the folder to begin anew, or write to another path.",
            )

    # Parts. Any rank.

    def write(self, stem: str, entries: Sequence[Entry], tensors: Sequence[Content], values: bytes) -> Part:
        """Write a part; its index comes last.

        Args:
            stem: of its files' names, which are nobody else's.
            entries: whose outputs these are.
            tensors: a safetensors file, in pieces; none where it has no tensors.
            values: what is no tensor.
        """
        part = Part(stem, entries=tuple(entries), files={})
        files = {part.values: _record([values])}
        if tensors:
            files[part.tensors] = _record(tensors)
            self._put(part.tensors, tensors)
        self._put(part.values, [values])
        part = Part(stem, tuple(entries), files)
        self._put(part.index, [encode_part_index(part)])
        return part

    # The end. Rank 0 only.

    def publish(self, identity: Mapping[str, Any], parts: Sequence[Part]) -> None:
        """Make what was written predictions, in one step.

        Args:
            identity: as they were begun.
            parts: of all ranks, without those that were there before.

        Raises:
            CheckpointError: another rank's part is not here.
        """
        everything = {name: record for name, (_, record) in self.kept.items()}
        for part in parts:
            index = _record([encode_part_index(part)])
            for name, record in {**part.files, part.index: index}.items():
                if self._size(name) != record.size:
                    raise CheckpointError(
                        f"{name} of the predictions {self.path!r} was written, and rank 0 does not see it whole.",
                        "all ranks must write to the same place.",
                        "write to a disk that all nodes share, or to an object store; rank 0 is on "
                        f"{os.uname().nodename}.",
                    )
            everything[part.index] = index
        together = [part for part, _ in self.kept.values()] + list(parts)
        self._replace(MANIFEST, manifest(identity, together, everything))
        used = {name for part in together for name in (*part.files, part.index)}
        for name in self._there:
            if is_prediction_file(name) and name not in used and name != LOCK:
                self._remove(name)
        self._remove(START_DOCUMENT)

    def release(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            self._remove(LOCK)
            os.close(self._lock)  # which unlocks it
            self._lock = None

    # Files

    def _make_folder(self) -> None:
        if self._filesystem is not None:
            make_folder(self._filesystem, self._root)
            return
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise CheckpointError(
                f"{self.path!r} is a file.",
                "predictions are a folder.",
                "write to another path, or move the file away.",
            )
        os.makedirs(self._root, exist_ok=True)

    def _take(self) -> None:
        """Keep other runs out, on a disk that knows locks."""
        if self._filesystem is not None:
            return
        lock = os.open(Path(self._root, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # The process's own: workers that were forked from one that was killed do not hold it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(lock)
            raise CheckpointError(
                f"Another run is writing predictions to {self.path!r}.",
                "two runs would do the same work twice.",
                "wait for it, or write to another path.",
            ) from None
        except OSError:  # a disk that knows no locks
            os.close(lock)
            return
        self._lock = lock

    def _names(self) -> list[str]:
        if self._filesystem is None:
            return sorted(os.listdir(self._root))
        with as_os_errors():
            self._filesystem.invalidate_cache()
            try:
                found = self._filesystem.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def _size(self, name: str) -> int | None:
        try:
            if self._filesystem is None:
                return os.stat(Path(self._root, name)).st_size
            with as_os_errors():
                self._filesystem.invalidate_cache()
                return int(self._filesystem.size(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None

    def _put(self, name: str, contents: Sequence[Content]) -> None:
        """Write a new file, which is there whole, or the index does not come."""
        if self._filesystem is None:
            with EagerFile(Path(self._root, name)) as file:
                file.writelines(contents)
            return
        for pause in (*_PAUSES, None):
            try:
                with put(self._filesystem, f"{self._root}/{name}") as stream:
                    stream.write(b"".join(contents))
                return
            except Exception as error:  # each store's library has errors of its own
                if pause is None or isinstance(error, PermissionError):
                    raise
            time.sleep(pause)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a document, in one step."""
        if self._filesystem is None:
            half = Path(self._root, f".{name}-{secrets.token_hex(4)}")
            with EagerFile(half) as file:
                file.write(content)
            os.replace(half, Path(self._root, name))
            sync_folder(Path(self._root))
            return

        def is_out() -> bool:
            with suppress(Exception):
                return bool(self._filesystem.cat_file(f"{self._root}/{name}") == content)
            return False

        put_surely(self._filesystem, f"{self._root}/{name}", content, is_out)

    def _remove(self, name: str) -> None:
        with suppress(Exception):  # what is left harms nobody
            if self._filesystem is None:
                os.unlink(Path(self._root, name))
            else:
                self._filesystem.rm_file(f"{self._root}/{name}")


def _difference(then: Any, now: Any) -> str:
    """What was then and is now; of lists of dicts, what differs in them."""
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        fields = [(name, one[name], other.get(name)) for one, other in zip(then, now, strict=True) for name in one]
        differing = [f"{name} {one!r:.100} then, {other!r:.100} now" for name, one, other in fields if one != other]
        return "; ".join(differing)
    return f"{then!r:.200} then, {now!r:.200} now"


def _first_repeated(entries: Iterable[Entry]) -> int | None:
    """Return the first index that is there twice."""
    runs = sorted((one.loader, first, first + count) for one in entries for first, count in one.runs or ())
    for (loader, _, end), (other, first, _) in pairwise(runs):
        if loader == other and first < end:
            return first
    return None


def _record(contents: Sequence[Content]) -> FileRecord:
    sums = BlockSums()
    for content in contents:
        sums.update(content)
    return FileRecord(sums.size, sums.text())
