"""Writes one object of a store as a stream. The object appears complete or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain.checkpoint._format.storage import protocols_of

# Protocols of stores on which creating a folder would create a bucket (even for a misspelt name), and on which each
# upload is atomic.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}


def is_object_store(filesystem: Any) -> bool:
    """Return whether a file system is an object store: it has no folders, and each upload is atomic."""
    return bool(_OBJECT_STORES.intersection(protocols_of(filesystem)))


def make_folder(filesystem: Any, root: str) -> None:
    """Create a folder, if the storage has folders."""
    if not is_object_store(filesystem):
        filesystem.makedirs(root, exist_ok=True)


@contextmanager
def open_object(filesystem: Any, path: str) -> Iterator[Any]:
    """Yield a stream whose content is stored when the context exits without an error.

    The upload ends when the stream is closed. If closing raises an error, the object may be stored nevertheless, so its
    size is compared. No other writer may use ``path``.
    """
    stream = filesystem.open(path, "wb")
    try:
        yield stream
        nbytes = stream.tell()
        try:
            stream.close()
        except Exception:
            if not _has_size(filesystem, path, nbytes):
                raise
    except BaseException:
        # The incomplete content must not be uploaded, even when the stream is garbage-collected.
        with suppress(Exception):
            stream.discard()
        with suppress(AttributeError):
            stream.closed = True
        raise


@contextmanager
def open_replacement(filesystem: Any, path: str) -> Iterator[Any]:
    """Yield a stream like `open_object`. An existing object is replaced once the new content is complete."""
    if is_object_store(filesystem):
        with open_object(filesystem, path) as stream:
            yield stream
        return
    folder, slash, name = path.rpartition("/")
    temporary = f"{folder}{slash}.{name}-{secrets.token_hex(8)}"
    make_folder(filesystem, folder)
    try:
        with open_object(filesystem, temporary) as stream:
            yield stream
        filesystem.mv(temporary, path)
    except BaseException:
        with suppress(Exception):
            filesystem.rm_file(temporary)
        raise


def _has_size(filesystem: Any, path: str, nbytes: int) -> bool:
    try:
        filesystem.invalidate_cache()
        return int(filesystem.size(path)) == nbytes
    except Exception:  # error classes depend on the store's library
        return False
