"""Lists, names and removes checkpoints in a folder, on a local disk or at an fsspec URL."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Container

from drivetrain._format import CheckpointReader, load
from drivetrain._format.checkpoint_folder import is_checkpoint_file
from drivetrain._format.manifest import MANIFEST
from drivetrain._storage.folder import StorageError
from drivetrain._storage.paths import child, folder_at, local_path
from drivetrain._storage.publication import remove_folder, reserve_name, write_pointer
from drivetrain._storage.retries import retried
from drivetrain.errors import CheckpointError

LATEST = "latest"
"""Name of a small file in a folder of checkpoints, which holds the name of the checkpoint that was written last."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9._=,+-]{0,250}")
_MAX_LATEST_BYTES = 256  # maximum number of bytes to read from a `LATEST` file


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` is a plain file name, which cannot refer to a path outside of its folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def children(folder: str) -> list[str]:
    """Return the names of the sub-folders of ``folder``; an empty list if ``folder`` does not exist.

    Hidden folders are skipped, because they are still being written or were left behind by a killed writer.

    Raises:
        StorageError: the storage cannot be listed.
    """
    try:
        return sorted(name for name, is_folder in folder_at(folder).entries() if is_folder and not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError.unanswered(f"{folder!r} cannot be listed", error) from error


def read_latest(folder: str) -> str | None:
    """Return the name in the `LATEST` file of a folder at a URL; None for a local folder, or if there is no such file.

    The listing of an object store may lag behind reads by name, so a new checkpoint may be missing in the listing.

    Raises:
        StorageError: the file cannot be read.
    """
    if local_path(folder) is not None:
        return None
    try:
        name = folder_at(folder).read(LATEST, _MAX_LATEST_BYTES).decode(errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        raise StorageError.unanswered(f"{LATEST} in {folder!r} cannot be read", error) from error
    return name if is_plain_name(name) else None


def is_taken(path: str) -> bool:
    """Return whether anything exists at a path.

    Raises:
        StorageError: the storage still fails after retries.
    """
    folder = folder_at(path)
    try:
        return retried(folder.exists, retries=2)
    except OSError as error:
        raise StorageError.unanswered(f"It is unknown whether {path!r} exists", error) from error


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

    root = local_path(folder)
    if root is not None:
        with contextlib.suppress(OSError):  # saving to the folder will report the error on all ranks
            return reserve_name(root, choose)
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
    path = child(folder, name)
    root, files = local_path(path), folder_at(path)
    if root is not None and all(map(is_checkpoint_file, files.names())):
        remove_folder(root)
        return True
    # Remove the manifest first, because a folder without it is not a checkpoint. Only listed files are removed.
    for file in (MANIFEST, *checkpoint.manifest.files):
        with contextlib.suppress(FileNotFoundError):
            files.remove(file)
    files.remove_if_empty()
    return True


def _load_matching(folder: str, name: str, identifier: str) -> CheckpointReader | None:
    """Open the checkpoint ``name`` if its identifier matches. Return None otherwise, and for symbolic links."""
    if not identifier or not is_plain_name(name):
        return None
    path = child(folder, name)
    if os.path.islink(local_path(path) or ""):
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
    root = local_path(folder)
    if root is None:
        folder_at(folder).commit(LATEST, [name.encode()])
    else:
        write_pointer(os.path.join(root, LATEST), name)
