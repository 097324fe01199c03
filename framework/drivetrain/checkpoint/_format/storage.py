"""Where a checkpoint is written: what a local disk and an object store have in common."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from typing import Any, Protocol

from drivetrain.checkpoint._format.file_writer import Sink
from drivetrain.errors import CheckpointError

JoinInfo = dict[str, str]

_CHECKPOINT_FILE = re.compile(
    r"manifest\.json|weights\.safetensors"  # the second one of format 0
    r"|(model|optimizer-\d+|callback-\d+|state|rank-\d+)(-\d{5}-of-\d{5})?(-[0-9a-f]{16})?(\.json|\.safetensors(\.index\.json)?)"
)


_EATEN_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


class Storage(Protocol):
    """A checkpoint that is being written. Rank 0 begins it; the others join with its ticket."""

    @property
    def join_info(self) -> JoinInfo:
        """What the other ranks need to write to the same place."""

    def file_name(self, name: str) -> str:
        """Return the name that a file gets here, fresh where a file of that name may be in use."""

    def open(self, name: str) -> AbstractContextManager[Sink]:
        """Create a file; once it is left without an error, it lasts."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, as the storage sees it now."""

    def keep(self) -> None:
        """From here on rank 0 may commit: what this rank wrote is no longer its to remove."""

    def commit(self, manifest: bytes, identifier: str) -> None:
        """Make what was written the checkpoint, in one step. Rank 0 only.

        Args:
            manifest: the content of `manifest.json`.
            identifier: in it.

        Raises:
            Exception: it is not known to be one. Whether it is, shows when it is read.
        """

    def abandon(self) -> None:
        """Remove what this rank wrote and nobody has committed, as well as can be: the storage itself may fail."""


def is_checkpoint_file(name: str) -> bool:
    """Whether a file name is one that a checkpoint of ours may hold."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


def filesystem_of(path: str) -> tuple[Any, str]:
    """Return the fsspec file system and the path on it; the file system is None for the local disk, ``~`` its home.

    Raises:
        CheckpointError: nobody knows the protocol, or what serves it is not installed.
    """
    if _EATEN_SLASH.match(path):
        raise CheckpointError(
            f"{path!r} is neither a path nor a URL.",
            "a URL has two slashes after its protocol; pathlib.Path leaves one of them out.",
            "pass the URL as a str.",
        )
    if not _is_url(path):
        return None, os.path.expanduser(path)
    # Imported here: a local path does not need it, and importing it costs time.
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{path!r} cannot be reached: {error}.",
            "URLs go through fsspec, which finds a file system by the protocol.",
            "check the spelling, or install what serves it: pip install 'drivetrain[s3]' for s3://.",
        ) from error
    return (None, root) if "file" in protocols_of(filesystem) else (filesystem, root)


def _is_url(path: str) -> bool:
    """Whether it is fsspec's: with a protocol before ``://``, or chained by ``::`` to one that fsspec knows."""
    if "://" in path:
        return True
    chained, double_colon, _ = path.partition("::")
    if not double_colon:
        return False
    from fsspec.registry import known_implementations, registry  # "run::1" is the name of a folder

    return chained in registry or chained in known_implementations


def path_exists(filesystem: Any, path: str) -> bool:
    """Whether there is an object, or a folder; fsspec's own ``exists`` takes an error for no.

    Raises:
        Exception: the storage refuses to say: an error of its library's.
    """
    try:
        filesystem.info(path)
    except FileNotFoundError:
        return False
    return True


def protocols_of(filesystem: Any) -> set[str]:
    """Return the protocols that a file system goes by."""
    known = filesystem.protocol
    return {known} if isinstance(known, str) else set(known)
