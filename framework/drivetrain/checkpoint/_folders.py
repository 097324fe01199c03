"""Folders of checkpoints, on a local disk or wherever fsspec reaches."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Container

from drivetrain.checkpoint._format import local_place
from drivetrain.checkpoint._format.place import filesystem_of

LATEST = "latest"
"""A small file beside the checkpoints that names the one written last."""


def child(folder: str, name: str) -> str:
    """Return the path of what lies in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def children(folder: str) -> list[str]:
    """Return the names of the folders that lie in one; none where it does not exist."""
    filesystem, root = filesystem_of(folder)
    if filesystem is None:
        try:
            with os.scandir(root) as entries:
                # A hidden one is being written, or was left behind.
                return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
    filesystem.invalidate_cache()
    try:
        entries = filesystem.ls(root, detail=True)
    except FileNotFoundError:
        return []
    return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in entries if one["type"] == "directory")


def is_taken(path: str) -> bool:
    """Whether there is anything at a path."""
    filesystem, root = filesystem_of(path)
    return os.path.lexists(root) if filesystem is None else bool(filesystem.exists(root))


def claim(folder: str, name: str, ours: Container[str]) -> tuple[str, Callable[[], None]]:
    """Choose a name that is free, or one of our own: ``name``, or ``name-v1``, ``name-v2``, ...

    On a local disk other runs keep off it, until what is returned beside the name is called.
    """

    def free(claimed: Container[str]) -> str:
        versions = itertools.chain([name], (f"{name}-v{number}" for number in itertools.count(1)))
        paths = ((one, child(folder, one)) for one in versions)
        return next(one for one, path in paths if path in ours or not (one in claimed or is_taken(path)))

    filesystem, root = filesystem_of(folder)
    if filesystem is None:
        with contextlib.suppress(OSError):  # which saving there tells, on all ranks
            return local_place.claim(root, free)
    return free(()), lambda: None


def remove(path: str) -> None:
    """Remove a checkpoint: in one step, or its manifest first, so that what is left of it is none."""
    filesystem, root = filesystem_of(path)
    if filesystem is None:
        local_place.discard(root)
        return
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(f"{root}/manifest.json")
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm(root, recursive=True)


def point_to(folder: str, name: str) -> None:
    """Say in a folder which of its checkpoints was written last."""
    filesystem, root = filesystem_of(folder)
    if filesystem is not None:
        filesystem.pipe_file(f"{root}/{LATEST}", name.encode())
        return
    local_place.write_name(os.path.join(root, LATEST), name)
