"""A checkpoint in an object store: fresh names for its files, and the manifest is all that is overwritten."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain.checkpoint._format.manifest import LONGEST_MANIFEST, MANIFEST, unseal
from drivetrain.checkpoint._format.place import Ticket, protocols_of
from drivetrain.errors import CheckpointError

# There, "making a folder" would make the bucket, and a misspelt name would be one more.
_KEEPS_NO_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}


def make_folder(filesystem: Any, root: str) -> None:
    """Make a folder where the storage keeps folders."""
    if not _KEEPS_NO_FOLDERS.intersection(protocols_of(filesystem)):
        filesystem.makedirs(root, exist_ok=True)


class ObjectPlace:
    """A prefix in an object store.

    Args:
        filesystem: fsspec's.
        root: the prefix.
        suffix: what makes the names of this save fresh; empty where nothing was there.
        replaced: the files of the checkpoint that this one takes the place of.
    """

    def __init__(self, filesystem: Any, root: str, suffix: str, replaced: Iterable[str] = ()) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._suffix = suffix
        self._replaced = list(replaced)
        self._created: list[str] = []

    @classmethod
    def begin(cls, filesystem: Any, root: str) -> ObjectPlace:
        """Look at what is there."""
        filesystem.invalidate_cache()
        if not filesystem.exists(root) or not filesystem.ls(root, detail=False):
            make_folder(filesystem, root)
            return cls(filesystem, root, "")
        replaced: list[str] = []
        # What a manifest that cannot be read refers to is left alone.
        with suppress(FileNotFoundError, CheckpointError):
            content = filesystem.cat_file(f"{root.rstrip('/')}/{MANIFEST}", end=LONGEST_MANIFEST)
            replaced = list(unseal(content, root).files)
        return cls(filesystem, root, f"-{secrets.token_hex(8)}", replaced)

    @classmethod
    def join(cls, filesystem: Any, root: str, ticket: Ticket) -> ObjectPlace:
        """Write beside rank 0."""
        return cls(filesystem, root, ticket["suffix"])

    @property
    def ticket(self) -> Ticket:
        return {"suffix": self._suffix}

    def named(self, name: str) -> str:
        stem, dot, extension = name.partition(".")
        return f"{stem}{self._suffix}{dot}{extension}"

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        self._created.append(name)
        stream = self._filesystem.open(self._path(name), "wb")
        try:
            yield stream
            stream.close()
        except BaseException:
            # Neither now nor when it is collected may the half of it be uploaded.
            with suppress(Exception):
                stream.discard()
            with suppress(AttributeError):
                stream.closed = True
            raise

    def size(self, name: str) -> int:
        self._filesystem.invalidate_cache()
        return int(self._filesystem.size(self._path(name)))

    def commit(self, manifest: bytes) -> None:
        self._filesystem.pipe_file(self._path(MANIFEST), manifest)
        self._created.clear()
        self._remove(self._replaced)

    def abandon(self) -> None:
        self._remove(self._created)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(Exception):
                self._filesystem.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
