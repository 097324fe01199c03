"""A checkpoint in an object store: fresh names for its files, and the manifest is all that is overwritten."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

from drivetrain.checkpoint._format.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest
from drivetrain.checkpoint._format.object_file import make_folder, open_object
from drivetrain.checkpoint._format.storage import JoinInfo
from drivetrain.errors import CheckpointError

_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between tries to put the manifest, and between looks whether it is there


def put_with_retries(filesystem: Any, path: str, content: bytes, is_stored: Callable[[], bool]) -> None:
    """Put a small object, and again where the store refuses, or gives no answer and does not have it.

    Args:
        filesystem: fsspec's.
        path: of the object, which may be there.
        content: of it.
        is_there: whether it is there by now, as the store says.

    Raises:
        Exception: it is not known to be there.
    """
    for pause in (*_PAUSES, None):
        try:
            filesystem.pipe_file(path, content)
            return
        except Exception as error:  # each store's library has errors of its own
            if is_stored():
                return
            if pause is None or isinstance(error, PermissionError):
                raise
        time.sleep(pause)


class ObjectStorage:
    """A prefix in an object store.

    Whoever else writes there, files of two writers are never under one name, and the manifest that is there names
    those of one. Once a manifest may be out, nothing that it names is removed by who wrote it: not where the answer
    is lost, nor on the ranks that have not heard it.

    Args:
        filesystem: fsspec's.
        root: the prefix.
        suffix: what makes the names of this save its own.
    """

    def __init__(self, filesystem: Any, root: str, suffix: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._suffix = suffix
        self._created: list[str] = []

    @classmethod
    def begin(cls, filesystem: Any, root: str) -> ObjectStorage:
        """Choose names of its own."""
        make_folder(filesystem, root)
        return cls(filesystem, root, f"-{secrets.token_hex(8)}")

    @classmethod
    def join(cls, filesystem: Any, root: str, join_info: JoinInfo) -> ObjectStorage:
        """Write beside rank 0."""
        return cls(filesystem, root, join_info["suffix"])

    @property
    def join_info(self) -> JoinInfo:
        return {"suffix": self._suffix}

    def file_name(self, name: str) -> str:
        stem, dot, extension = name.partition(".")
        return f"{stem}{self._suffix}{dot}{extension}"

    def open(self, name: str) -> AbstractContextManager[Any]:
        self._created.append(name)
        return open_object(self._filesystem, self._path(name))

    def size(self, name: str) -> int:
        self._filesystem.invalidate_cache()
        return int(self._filesystem.size(self._path(name)))

    def keep(self) -> None:
        self._created.clear()

    def commit(self, manifest: bytes, identifier: str) -> None:
        before = self._read_manifest()
        self._put_manifest(manifest, identifier)
        now = self._read_manifest()
        # What another writer's manifest names, which came after this one, is that writer's to remove.
        if before is not None and now is not None and now.identifier == identifier:
            self._remove(before.files.keys() - now.files.keys())

    def abandon(self) -> None:
        self._remove(self._created)

    def _put_manifest(self, content: bytes, identifier: str) -> None:
        """Put it; where the store refuses, or gives no answer, ask what is there, and put it again."""

        def is_stored() -> bool:
            there = self._read_manifest()
            return there is not None and there.identifier == identifier

        put_with_retries(self._filesystem, self._path(MANIFEST), content, is_stored)

    def _read_manifest(self) -> Manifest | None:
        """The manifest that is there now; None where none is, or it cannot be read: what it names is left alone."""
        with suppress(Exception):
            self._filesystem.invalidate_cache()
            content = self._filesystem.cat_file(self._path(MANIFEST), start=0, end=MAX_MANIFEST_BYTES + 1)
            with suppress(CheckpointError):
                return decode_manifest(content, self._root)
        return None

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(Exception):
                self._filesystem.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
