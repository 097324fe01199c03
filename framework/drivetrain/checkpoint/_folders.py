"""Lists, names and removes checkpoints in a folder, on a local disk or at an fsspec URL."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Container

from drivetrain._runtime.working_directory import lacks_its_start
from drivetrain.checkpoint._format import CheckpointReader, StorageError, load, local_storage
from drivetrain.checkpoint._format.folder import as_os_errors
from drivetrain.checkpoint._format.manifest import MANIFEST
from drivetrain.checkpoint._format.storage import filesystem_of, is_checkpoint_file, path_exists
from drivetrain.errors import CheckpointError

LATEST = "latest"
"""Name of a small file in a folder of checkpoints, which holds the name of the checkpoint that was written last."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9._=,+-]{0,250}")
_MAX_LATEST_BYTES = 256  # maximum number of bytes to read from a `LATEST` file
_RETRY_PAUSES = (0.5, 1.0)  # seconds between retries of a failing request


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` is a plain file name, which cannot refer to a path outside of its folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def resolve_folder(folder: str) -> str:
    """Return the real path of a local folder, or a URL without its trailing slash."""
    filesystem, root = filesystem_of(folder)
    if filesystem is not None:
        return folder.rstrip("/")
    return os.path.normpath(root) if lacks_its_start(root) else os.path.realpath(root)


def child(folder: str, name: str) -> str:
    """Return the path of the entry ``name`` in ``folder``."""
    return f"{folder.rstrip('/')}/{name}"


def children(folder: str) -> list[str]:
    """Return the names of the sub-folders of ``folder``; an empty list if ``folder`` does not exist.

    Hidden local folders are skipped, because they are still being written or were left behind by a killed writer.

    Raises:
        StorageError: the storage cannot be listed.
    """
    filesystem, root = filesystem_of(folder)
    try:
        if filesystem is None:
            with os.scandir(root) as entries:
                return sorted(entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry))
        with as_os_errors():
            filesystem.invalidate_cache()
            entries = filesystem.ls(root, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(
            f"{folder!r} cannot be listed: {error}.",
            "it is unknown whether the folder holds a checkpoint.",
            "check the storage, the credentials and the network.",
        ) from error
    return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link that points to itself
        return False


def read_latest(folder: str) -> str | None:
    """Return the name in the `LATEST` file of a folder at a URL; None for a local folder, or if there is no such file.

    The listing of an object store may lag behind reads by name, so a new checkpoint may be missing in the listing.

    Raises:
        StorageError: the file cannot be read.
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
            "it is unknown whether there is a checkpoint that the listing does not show.",
            "check the storage, the credentials and the network.",
        ) from error
    return name if is_plain_name(name) else None


def is_taken(path: str) -> bool:
    """Return whether anything exists at a path.

    Raises:
        StorageError: the storage still fails after retries.
    """
    filesystem, root = filesystem_of(path)
    if filesystem is None:
        return os.path.lexists(root)
    for pause in _RETRY_PAUSES:
        with contextlib.suppress(OSError), as_os_errors():
            return path_exists(filesystem, root)
        time.sleep(pause)
    try:
        with as_os_errors():
            filesystem.invalidate_cache()
            return path_exists(filesystem, root)
    except OSError as error:
        raise StorageError(
            f"It is unknown whether {path!r} exists: {error}.",
            "another run's checkpoint must not be overwritten.",
            "check the storage, the credentials and the network.",
        ) from error


def claim_name(folder: str, name: str, is_replaceable: Callable[[str], bool]) -> tuple[str, Callable[[], None]]:
    """Choose the first of ``name``, ``name-v1``, ``name-v2``, ... that is free or may be replaced.

    On a local disk the name is reserved against other runs until the returned function is called.

    Args:
        folder: the folder of checkpoints.
        name: the preferred name.
        is_replaceable: returns whether the checkpoint with this name belongs to this run and may be replaced.

    Returns:
        The name, and a function that releases the name.
    """

    def choose(claimed: Container[str]) -> str:
        versions = itertools.chain([name], (f"{name}-v{number}" for number in itertools.count(1)))
        return next(
            version
            for version in versions
            if is_replaceable(version) or not (version in claimed or is_taken(child(folder, version)))
        )

    filesystem, root = filesystem_of(folder)
    if filesystem is None:
        with contextlib.suppress(OSError):  # saving to the folder will report the error on all ranks
            return local_storage.claim_name(root, choose)
    return choose(()), lambda: None


def is_checkpoint_at(folder: str, name: str, identifier: str) -> bool:
    """Return whether the checkpoint with this identifier is in ``folder`` under this name."""
    return _load_matching(folder, name, identifier) is not None


def remove(folder: str, name: str, identifier: str) -> bool:
    """Remove a checkpoint from a folder if its identifier matches. Other files are kept.

    Args:
        folder: the folder of checkpoints.
        name: the checkpoint's name in the folder.
        identifier: the identifier in the checkpoint's manifest.

    Returns:
        Whether the checkpoint existed.

    Raises:
        OSError: a file cannot be removed, or the storage does not answer.
    """
    checkpoint = _load_matching(folder, name, identifier)
    if checkpoint is None:
        return False
    filesystem, root = filesystem_of(child(folder, name))
    if filesystem is None and all(map(is_checkpoint_file, os.listdir(root))):
        local_storage.remove_checkpoint(root)
        return True
    # Remove the manifest first, because a folder without it is not a checkpoint. Only listed files are removed.
    unlink = os.unlink if filesystem is None else filesystem.rm_file
    for file in (MANIFEST, *checkpoint.manifest.files):
        with as_os_errors(), contextlib.suppress(FileNotFoundError):
            unlink(f"{root}/{file}")
    with contextlib.suppress(OSError, NotImplementedError):  # the folder is not empty, or the storage has no folders
        (os.rmdir if filesystem is None else filesystem.rmdir)(root)
    return True


def _load_matching(folder: str, name: str, identifier: str) -> CheckpointReader | None:
    """Open the checkpoint ``name`` if its identifier matches. Return None otherwise, and for symbolic links."""
    if not identifier or not is_plain_name(name):
        return None
    path = child(folder, name)
    filesystem, root = filesystem_of(path)
    if filesystem is None and os.path.islink(root):
        return None  # drivetrain creates no links, so drivetrain did not write this checkpoint
    try:
        checkpoint = load(path)
    except StorageError as error:
        raise OSError(error.what) from error
    except CheckpointError:
        return None
    return checkpoint if checkpoint.manifest.identifier == identifier else None


def write_latest(folder: str, name: str) -> None:
    """Write the name of the newest checkpoint to the `LATEST` file of a folder."""
    filesystem, root = filesystem_of(folder)
    if filesystem is not None:
        filesystem.pipe_file(f"{root}/{LATEST}", name.encode())
        return
    local_storage.write_pointer(os.path.join(root, LATEST), name)
