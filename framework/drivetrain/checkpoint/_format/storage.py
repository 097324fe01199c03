"""The interface for writing a checkpoint to a local disk or an object store."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from typing import Any, Protocol

from drivetrain.checkpoint._format.file_writer import Sink
from drivetrain.errors import CheckpointError

JoinInfo = dict[str, str]

_CHECKPOINT_FILE = re.compile(
    r"manifest\.json|weights\.safetensors"  # `weights.safetensors` is the file of format 0
    r"|(model|optimizer-\d+|callback-\d+|state|rank-\d+)(-\d{5}-of-\d{5})?(-[0-9a-f]{16})?(\.json|\.safetensors(\.index\.json)?)"
)
_MISSING_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


class Storage(Protocol):
    """A checkpoint that is being written. Rank 0 begins it, and the other ranks join with rank 0's `join_info`."""

    @property
    def join_info(self) -> JoinInfo:
        """What the other ranks need to write to the same storage."""

    def file_name(self, name: str) -> str:
        """Return the name to use for a file, which is unique if an existing file of this name may be in use."""

    def open(self, name: str) -> AbstractContextManager[Sink]:
        """Create a file, which is durable once the context exits without an error."""

    def size(self, name: str) -> int:
        """Return a file's current size in bytes."""

    def keep(self) -> None:
        """Exclude the files written so far from `abandon`, because rank 0 may commit them from now on."""

    def commit(self, manifest: bytes, identifier: str) -> None:
        """Commit the files as the checkpoint, atomically. Rank 0 only.

        Args:
            manifest: content of `manifest.json`.
            identifier: the identifier in the manifest.

        Raises:
            Exception: the storage did not confirm the commit, which may have happened nevertheless.
        """

    def abandon(self) -> None:
        """Remove this rank's uncommitted files, as far as the storage allows."""


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file name is one that a checkpoint may contain."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


def filesystem_of(path: str) -> tuple[Any, str]:
    """Return the fsspec file system and the path on it; None and the path, with ``~`` expanded, for the local disk.

    Raises:
        CheckpointError: the protocol is unknown, or its library is not installed.
    """
    if _MISSING_SLASH.match(path):
        raise CheckpointError(
            f"{path!r} is neither a path nor a URL.",
            "a URL has two slashes after its protocol; pathlib.Path removes one of them.",
            "pass the URL as a str.",
        )
    if not _is_url(path):
        return None, os.path.expanduser(path)
    # Imported here because the import is slow, and local paths do not need it.
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{path!r} cannot be reached: {error}.",
            "fsspec opens URLs, and selects the file system by the protocol.",
            "check the spelling, or install the library of the file system: pip install 'drivetrain[s3]' for s3://.",
        ) from error
    return (None, root) if "file" in protocols_of(filesystem) else (filesystem, root)


def _is_url(path: str) -> bool:
    """Return whether fsspec handles this path: it has a ``://``, or begins with a known protocol and ``::``."""
    if "://" in path:
        return True
    chained, double_colon, _ = path.partition("::")
    if not double_colon:
        return False
    from fsspec.registry import known_implementations, registry  # "run::1" is a folder's name, not a URL

    return chained in registry or chained in known_implementations


def path_exists(filesystem: Any, path: str) -> bool:
    """Return whether an object or folder exists. Unlike fsspec's ``exists``, raise on errors.

    Raises:
        Exception: the storage failed; the class of the error depends on the storage's library.
    """
    try:
        filesystem.info(path)
    except FileNotFoundError:
        return False
    return True


def protocols_of(filesystem: Any) -> set[str]:
    """Return the protocol names of a file system."""
    known = filesystem.protocol
    return {known} if isinstance(known, str) else set(known)
