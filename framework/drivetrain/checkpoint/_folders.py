"""Folders of checkpoints, on a local disk or wherever fsspec reaches."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Container

from drivetrain.checkpoint._format import Checkpoint, StorageError, load, local_storage
from drivetrain.checkpoint._format.folder import as_os_errors
from drivetrain.checkpoint._format.manifest import MANIFEST
from drivetrain.checkpoint._format.storage import filesystem_of, is_checkpoint_file, path_exists
from drivetrain.errors import CheckpointError

LATEST = "latest"
"""A small file beside the checkpoints that names the one written last."""


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9._=,+-]{0,250}")
_MAX_LATEST_BYTES = 256  # bytes of `LATEST` that are read
_PAUSES = (0.5, 1.0)  # seconds between questions to a store that refuses


def is_plain_name(name: str) -> bool:
    """Whether a text is the name of something directly in a folder, and leads nowhere else."""
    return _PLAIN_NAME.fullmatch(name) is not None


def resolve_folder(folder: str) -> str:
    """Return where a folder is, the same for every way to say it: a path without links, or a URL."""
    filesystem, root = filesystem_of(folder)
    return os.path.realpath(os.path.expanduser(root)) if filesystem is None else folder.rstrip("/")


def child(folder: str, name: str) -> str:
    """Return the path of what lies in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def children(folder: str) -> list[str]:
    """Return the names of the folders that lie in one; none where it does not exist.

    Raises:
        StorageError: the storage refuses.
    """
    filesystem, root = filesystem_of(folder)
    try:
        if filesystem is None:
            with os.scandir(root) as entries:
                # A hidden one is being written, or was left behind.
                return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
        with as_os_errors():
            filesystem.invalidate_cache()
            entries = filesystem.ls(root, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(
            f"{folder!r} cannot be listed: {error}.",
            "whether there is a checkpoint in it is not known.",
            "check the storage, the credentials and the network.",
        ) from error
    return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in entries if one["type"] == "directory")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        return False


def read_latest(folder: str) -> str | None:
    """Return which of the checkpoints at a URL was written last, as `LATEST` says there; None on a disk.

    A store's listing may lag behind what it gives when it is asked by name.

    Raises:
        StorageError: the storage refuses.
    """
    filesystem, root = filesystem_of(folder)
    if filesystem is None:
        return None
    try:
        with as_os_errors():
            path = child(root, LATEST)
            filesystem.invalidate_cache()
            size = min(int(filesystem.size(path) or 0), _MAX_LATEST_BYTES)
            name = filesystem.cat_file(path, start=0, end=size).decode(errors="replace") if size else ""
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise StorageError(
            f"{LATEST} in {folder!r} cannot be read: {error}.",
            "whether there is a checkpoint in it that is not listed is not known.",
            "check the storage, the credentials and the network.",
        ) from error
    return name if is_plain_name(name) else None


def is_taken(path: str) -> bool:
    """Whether there is anything at a path.

    Raises:
        StorageError: the storage refuses to say.
    """
    filesystem, root = filesystem_of(path)
    if filesystem is None:
        return os.path.lexists(root)
    for pause in _PAUSES:
        with contextlib.suppress(OSError), as_os_errors():
            return path_exists(filesystem, root)
        time.sleep(pause)
    try:
        with as_os_errors():
            filesystem.invalidate_cache()
            return path_exists(filesystem, root)
    except OSError as error:
        raise StorageError(
            f"Whether there is anything at {path!r} cannot be told: {error}.",
            "what is there may be somebody else's, and is not written over.",
            "check the storage, the credentials and the network.",
        ) from error


def claim_name(folder: str, name: str, ours: Callable[[str], bool]) -> tuple[str, Callable[[], None]]:
    """Choose a name that is free, or one that may be written over: ``name``, or ``name-v1``, ``name-v2``, ...

    On a local disk other runs keep off it, until what is returned beside the name is called.

    Args:
        folder: where it is to be.
        name: what is asked for.
        ours: whether what is there under a name is the run's own, and may be replaced.
    """

    def free(claimed: Container[str]) -> str:
        versions = itertools.chain([name], (f"{name}-v{number}" for number in itertools.count(1)))
        return next(one for one in versions if ours(one) or not (one in claimed or is_taken(child(folder, one))))

    filesystem, root = filesystem_of(folder)
    if filesystem is None:
        with contextlib.suppress(OSError):  # which saving there tells, on all ranks
            return local_storage.claim_name(root, free)
    return free(()), lambda: None


def is_checkpoint_at(folder: str, name: str, identifier: str) -> bool:
    """Whether the checkpoint of this identifier lies in a folder under this name, and nothing else does."""
    return _load_matching(folder, name, identifier) is not None


def remove(folder: str, name: str, identifier: str) -> bool:
    """Remove a checkpoint that lies directly in a folder, if it is the one that is meant; nothing else is touched.

    Args:
        folder: where it lies.
        name: under which name.
        identifier: its manifest's.

    Returns:
        Whether it was there.

    Raises:
        OSError: the storage refuses.
    """
    found = _load_matching(folder, name, identifier)
    if found is None:
        return False
    filesystem, root = filesystem_of(child(folder, name))
    if filesystem is None and all(map(is_checkpoint_file, os.listdir(root))):
        local_storage.remove_checkpoint(root)
        return True
    # Its manifest first: what is left of it without is none. Only its own files go, one by one.
    unlink = os.unlink if filesystem is None else filesystem.rm_file
    for file in (MANIFEST, *found.manifest.files):
        with as_os_errors(), contextlib.suppress(FileNotFoundError):
            unlink(f"{root}/{file}")
    with contextlib.suppress(OSError, NotImplementedError):  # where it keeps folders, and this one is empty now
        (os.rmdir if filesystem is None else filesystem.rmdir)(root)
    return True


def _load_matching(folder: str, name: str, identifier: str) -> Checkpoint | None:
    if not identifier or not is_plain_name(name):
        return None
    path = child(folder, name)
    filesystem, root = filesystem_of(path)
    if filesystem is None and os.path.islink(root):
        return None  # we make no links
    try:
        checkpoint = load(path)
    except StorageError as error:
        raise OSError(error.what) from error
    except CheckpointError:
        return None
    return checkpoint if checkpoint.manifest.identifier == identifier else None


def write_latest(folder: str, name: str) -> None:
    """Say in a folder which of its checkpoints was written last."""
    filesystem, root = filesystem_of(folder)
    if filesystem is not None:
        filesystem.pipe_file(f"{root}/{LATEST}", name.encode())
        return
    local_storage.write_pointer(os.path.join(root, LATEST), name)
