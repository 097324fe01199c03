"""One object in a store, written as a stream: it is there whole, or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain.checkpoint._format.storage import protocols_of

# There, "making a folder" would make the bucket, and a misspelt name would be one more. What is put is there at once.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}


def is_object_store(filesystem: Any) -> bool:
    """Whether it keeps objects under keys, without folders, each of which is there whole or not at all."""
    return bool(_OBJECT_STORES.intersection(protocols_of(filesystem)))


def make_folder(filesystem: Any, root: str) -> None:
    """Make a folder where the storage keeps folders."""
    if not is_object_store(filesystem):
        filesystem.makedirs(root, exist_ok=True)


@contextmanager
def open_object(filesystem: Any, path: str) -> Iterator[Any]:
    """Give a stream to write to; once it is left without an error, what was written is there.

    The last of it is sent as the stream is closed. Where that fails, the store may have taken it all the same: it is
    asked how much is there. ``path`` must be of a name that nobody else writes to.
    """
    stream = filesystem.open(path, "wb")
    try:
        yield stream
        nbytes = stream.tell()
        try:
            stream.close()
        except Exception:
            if not _has(filesystem, path, nbytes):
                raise
    except BaseException:
        # Neither now nor when it is collected may the half of it be uploaded.
        with suppress(Exception):
            stream.discard()
        with suppress(AttributeError):
            stream.closed = True
        raise


@contextmanager
def open_replacement(filesystem: Any, path: str) -> Iterator[Any]:
    """Give a stream as `open_object` does, of an object that may be there: until this one is whole it stays as it is."""
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


def _has(filesystem: Any, path: str, nbytes: int) -> bool:
    try:
        filesystem.invalidate_cache()
        return int(filesystem.size(path)) == nbytes
    except Exception:  # each store's library has errors of its own
        return False
