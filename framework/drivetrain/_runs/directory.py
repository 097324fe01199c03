"""The folders of runs, ``<root>/<name>/version_<n>``: their names, and how a run gets one that no other run has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from drivetrain._storage.paths import child, folder_at, local_path

_VERSION = re.compile(r"version_(\d{1,9})")
_RANDOM_LETTERS = 6  # number of random letters in a name that contains a timestamp

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run's folder."""

RECORD = "run.json"
"""Name of the record file; a folder that contains it belongs to a run."""


def runs_folder_of(root: str, name: str) -> str:
    """Return the parent of the folders of all runs with this name: ``<root>/<name>``."""
    if not name:
        return root.rstrip("/") or root
    return child(root, name) if root else name


def folder_name(version: int | str | None) -> str | None:
    """Return the name of the folder of a version, ``version_<n>`` for a number; None if the version is not set."""
    return f"version_{version}" if isinstance(version, int) else version or None


def split_folder(folder: str) -> tuple[str, str]:
    """Return the parent of a run's folder, and the folder's name."""
    parent, _, name = folder.rstrip("/").rpartition("/")
    return parent, name


def claim_version(runs_folders: Iterable[str]) -> tuple[str, list[str]]:
    """Create a folder of the same name, which no other run has, in each of some folders of runs.

    On disks the name is ``version_`` and the next number that is free everywhere. If one of the folders of runs is at a
    URL, where creating a folder is not atomic, the name is a timestamp with random letters, and nothing is created.

    Returns:
        The name, and the paths of the folders that were created.

    Raises:
        OSError: a folder cannot be created.
    """
    places = list(map(local_path, runs_folders))
    on_disks = [root for root in places if root is not None]
    if len(on_disks) < len(places):
        letters = "".join(chr(ord("a") + byte % 26) for byte in os.urandom(_RANDOM_LETTERS))
        return f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{letters}", []
    roots = list({os.path.realpath(root): root for root in on_disks}.values())
    number = max(map(_next_number, roots))
    while not _make_new(paths := [os.path.join(root, f"version_{number}") for root in roots]):
        number += 1
    return f"version_{number}", paths


def make_directory(path: str) -> list[str]:
    """Create a directory if it does not exist. Return its path in a list if it is local and was created."""
    folder, root = folder_at(path), local_path(path)
    is_new = root is not None and not folder.exists()
    folder.make()
    return [root] if root is not None and is_new else []


def remove_unused(folders: Sequence[str]) -> bool:
    """Remove the local folders that were created for a run if nothing was written but the record in the first.

    Returns:
        Whether the folders were removed.
    """
    if not folders or os.listdir(folders[0]) != [RECORD]:
        return False
    os.unlink(os.path.join(folders[0], RECORD))
    for folder in folders:
        with suppress(OSError):  # a logger has written there, or there are other runs
            os.rmdir(folder)
            os.rmdir(os.path.dirname(folder))
    return True


def _make_new(paths: list[str]) -> bool:
    """Create all of the folders, or none if one of them exists."""
    made: list[str] = []
    for path in paths:
        try:
            os.makedirs(path)
        except FileExistsError:
            for earlier in made:
                os.rmdir(earlier)
            return False
        made.append(path)
    return True


def _next_number(root: str) -> int:
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    matches = map(_VERSION.fullmatch, names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)
