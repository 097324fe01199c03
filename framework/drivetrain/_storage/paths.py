"""Paths and URLs: which folder one leads to."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain._runtime.working_directory import lacks_its_start
from drivetrain._storage.folder import Folder
from drivetrain._storage.local_folder import LocalFolder
from drivetrain._storage.remote_folder import RemoteFolder, protocols_of
from drivetrain.errors import CheckpointError

_MISSING_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")


def folder_at(path: str) -> Folder:
    """Return the folder at a path or an fsspec URL, which need not exist. ``~`` is expanded.

    Raises:
        CheckpointError: the protocol is unknown, or its library is not installed.
    """
    filesystem, root = _filesystem_of(path)
    return LocalFolder(path, root) if filesystem is None else RemoteFolder(path, filesystem, root)


def local_path(path: str) -> str | None:
    """Return a path on the local disk, with ``~`` expanded; None for a URL of another file system.

    Raises:
        CheckpointError: see `folder_at`.
    """
    filesystem, root = _filesystem_of(path)
    return root if filesystem is None else None


def resolve_folder(folder: str) -> str:
    """Return the real path of a local folder, or a URL without its trailing slash."""
    root = local_path(folder)
    if root is None:
        return folder.rstrip("/")
    is_known = os.path.isabs(root) or not lacks_its_start(root)
    return os.path.realpath(root) if is_known else os.path.normpath(root)


def child(folder: str, name: str) -> str:
    """Return the path of the entry ``name`` in ``folder``."""
    return f"{folder.rstrip('/')}/{name}"


def split(path: str) -> tuple[str, str]:
    """Return the folder of a file, and the file's name in it."""
    folder, slash, name = path.rpartition("/")
    if not slash:
        return ".", path
    return f"{folder}/" if not folder or folder.endswith("/") else folder, name


def publish(folder: str, name: str, content: bytes) -> str:
    """Write a file, replacing a file of the same name, and return its path or URL.

    Args:
        folder: a path or URL, which is created if necessary.
        name: the file's name, which may contain folders.
        content: the content.

    Raises:
        OSError: writing failed.
    """
    path = child(folder, name)
    parent, file = split(path)
    target = folder_at(parent)
    target.make()
    target.write(file, content)
    return path


def publish_export(folder: str, name: str, export: Callable[[str], object]) -> str:
    """Write a file as `publish` does, with the content that ``export`` writes to the local path that it receives."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "content")
        export(str(path))
        return publish(folder, name, path.read_bytes())


def _filesystem_of(path: str) -> tuple[Any, str]:
    """Return the fsspec file system and the path on it; None and the path for the local disk."""
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
