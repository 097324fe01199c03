"""Writes a checkpoint to an object store. Files get unique names, and only the manifest is overwritten."""

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

_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts to upload the manifest


def put_with_retries(filesystem: Any, path: str, content: bytes, is_stored: Callable[[], bool]) -> None:
    """Upload a small object, retrying if the upload fails or its reply is lost.

    Args:
        filesystem: the fsspec file system.
        path: path of the object, which may exist.
        content: the new content of the object.
        is_stored: returns whether the store holds the new content.

    Raises:
        Exception: the upload failed, and the object is not known to be stored.
    """
    for pause in (*_PAUSES, None):
        try:
            filesystem.pipe_file(path, content)
            return
        except Exception as error:  # error classes depend on the store's library
            if is_stored():
                return
            if pause is None or isinstance(error, PermissionError):
                raise
        time.sleep(pause)


class ObjectStorage:
    """The objects of a checkpoint below a prefix in an object store.

    Concurrent writers never share file names, and the manifest names the files of only one of them. Once a manifest may
    have been stored, no rank deletes the files that it names, because the reply to a successful upload can be lost.

    Args:
        filesystem: the fsspec file system.
        root: the prefix.
        suffix: text that makes the file names of this save unique.
    """

    def __init__(self, filesystem: Any, root: str, suffix: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._suffix = suffix
        self._created_names: list[str] = []

    @classmethod
    def begin(cls, filesystem: Any, root: str) -> ObjectStorage:
        """Begin a save with unique file names."""
        make_folder(filesystem, root)
        return cls(filesystem, root, f"-{secrets.token_hex(8)}")

    @classmethod
    def join(cls, filesystem: Any, root: str, join_info: JoinInfo) -> ObjectStorage:
        """Return the storage that rank 0 began."""
        return cls(filesystem, root, join_info["suffix"])

    @property
    def join_info(self) -> JoinInfo:
        return {"suffix": self._suffix}

    def file_name(self, name: str) -> str:
        stem, dot, extension = name.partition(".")
        return f"{stem}{self._suffix}{dot}{extension}"

    def open(self, name: str) -> AbstractContextManager[Any]:
        self._created_names.append(name)
        return open_object(self._filesystem, self._path(name))

    def size(self, name: str) -> int:
        self._filesystem.invalidate_cache()
        return int(self._filesystem.size(self._path(name)))

    def keep(self) -> None:
        self._created_names.clear()

    def commit(self, manifest: bytes, identifier: str) -> None:
        before = self._read_manifest()
        self._put_manifest(manifest, identifier)
        after = self._read_manifest()
        # If another writer has replaced this manifest in the meantime, that writer does the cleanup.
        if before is not None and after is not None and after.identifier == identifier:
            self._remove(before.files.keys() - after.files.keys())

    def abandon(self) -> None:
        self._remove(self._created_names)

    def _put_manifest(self, content: bytes, identifier: str) -> None:
        """Upload the manifest, and retry until the stored manifest has this identifier."""

        def is_stored() -> bool:
            stored = self._read_manifest()
            return stored is not None and stored.identifier == identifier

        put_with_retries(self._filesystem, self._path(MANIFEST), content, is_stored)

    def _read_manifest(self) -> Manifest | None:
        """Return the stored manifest; None if there is none or it is unreadable, so that no old files are removed."""
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
