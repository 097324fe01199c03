"""The folder of a checkpoint: opens an existing one for reading, and begins to write one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from drivetrain._format.manifest import MANIFEST
from drivetrain._storage.folder import Folder, NoFileError, StorageError
from drivetrain._storage.paths import folder_at, local_path
from drivetrain._storage.publication import (
    LocalPublication,
    Publication,
    RemotePublication,
    clear_leftovers,
    find_interrupted_replacement,
)
from drivetrain.errors import CheckpointError

_CHECKPOINT_FILE = re.compile(
    r"manifest\.json|weights\.safetensors"  # `weights.safetensors` is the file of format 0
    r"|(model|optimizer-\d+|callback-\d+|state|rank-\d+)(-\d{5}-of-\d{5})?(-[0-9a-f]{16})?(\.json|\.safetensors(\.index\.json)?)"
)
_EXTRA_BYTES_PER_FILE = 4096  # for a file's header, partial last block and manifest entry


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file name is one that a checkpoint may contain."""
    return _CHECKPOINT_FILE.fullmatch(name) is not None


# Reading


def existing_folder(path: str) -> Folder:
    """Return the folder at a path or an fsspec URL, without checking whether it holds a checkpoint.

    Raises:
        CheckpointError: there is no folder at this path.
    """
    folder = folder_at(path)
    try:
        exists = folder.exists()
    except OSError as error:
        raise storage_error(path, f"it cannot be reached: {error}") from error
    root = local_path(path)
    if not exists:
        moved_aside = None if root is None else find_interrupted_replacement(root)
        if moved_aside is None:
            raise CheckpointError(f"There is no checkpoint at {path!r}.", "the path does not exist.", "check the path.")
        return moved_aside
    return folder


def read_if_there(folder: Folder, name: str, limit: int) -> bytes | None:
    """Return the first ``limit`` bytes of a regular file; None if there is no such file.

    Raises:
        StorageError: the storage failed, or denied access.
    """
    try:
        source = folder.open(name)
        content = bytearray(min(source.size, limit))
        source.fill(0, memoryview(content))
        return bytes(content)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, NoFileError):
        return None
    except OSError as error:
        raise storage_error(folder.path, f"{name} cannot be read: {error}") from error


def storage_error(path: str, problem: str) -> StorageError:
    """Return the error for a storage that failed."""
    return StorageError(
        f"The checkpoint {path!r} cannot be read: {problem}.",
        "the storage denied access or does not answer; the checkpoint itself may be intact.",
        "check the path, its permissions and the network, and try again.",
    )


# Writing


def begin_checkpoint(path: str, needed: int, files: int) -> Publication:
    """Begin to write a checkpoint, on rank 0, after clearing what killed writers left beside it.

    Args:
        path: path or URL of the checkpoint.
        needed: number of bytes that all ranks will write.
        files: number of files that all ranks will write.

    Raises:
        CheckpointError: the path exists and is not a checkpoint, or the disk is too full.
        OSError: the folder cannot be created.
    """
    root = local_path(path)
    if root is None:
        return RemotePublication.begin(folder_at(path))
    target = Path(os.path.realpath(root))
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(target.parent)
    _check_disk_space(target, needed + files * _EXTRA_BYTES_PER_FILE)
    return LocalPublication.begin(target, check_replaceable)


def join_checkpoint(path: str, token: str) -> Publication:
    """Return the publication that rank 0 began."""
    root = local_path(path)
    if root is None:
        return RemotePublication(folder_at(path), token)
    return LocalPublication.join(Path(os.path.realpath(root)), token)


def check_replaceable(target: Path) -> None:
    """Raise if there is something other than a checkpoint at a path."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(
            f"{str(target)!r} is a file.", "a checkpoint is a folder.", "save to another path, or move the file away."
        )
    names = sorted(os.listdir(target))
    foreign = [name for name in names if not is_checkpoint_file(name)]
    if names and (foreign or MANIFEST not in names):
        raise CheckpointError(
            f"{str(target)!r} holds {', '.join(foreign[:5]) or 'files without a manifest'}, which is not part of a "
            "checkpoint.",
            "saving to a path replaces everything in it.",
            "save to another path, or move these files away.",
        )


def _check_disk_space(target: Path, needed: int) -> None:
    disk = shutil.disk_usage(target.parent)
    if disk.total and disk.free < needed:  # some file systems report no sizes
        raise CheckpointError(
            f"{str(target)!r} needs {needed:,} bytes, and {str(target.parent)!r} has {disk.free:,} bytes free.",
            "an older checkpoint is removed only after the new one is complete; nothing was written",
            "free some space, keep fewer checkpoints (save_top_k, keep_last), save weights only "
            "(save_weights_only=True), or save to another disk or an object store",
        )
