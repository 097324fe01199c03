"""A run's directory, ``<root>/<name>/version_<n>``, created at the first write."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from drivetrain._storage.folder import Folder
from drivetrain._storage.local_publication import lock_folder
from drivetrain._storage.paths import child, folder_at, local_path

_VERSION = re.compile(r"version_(\d{1,9})")
_RANDOM_LETTERS = 6  # number of random letters in a name that contains a timestamp

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in a run's directory."""

RECORD = "run.json"
"""Name of the record file; a directory that contains it belongs to a run."""


class RunDirectory:
    """The directory of one run, below a local path or any fsspec URL.

    Args:
        root: a local path or a URL such as ``s3://bucket/logs``.
        name: sub-directory of the experiment; empty for none.
        version: a number, a directory name, or None for the next free number (at a URL a timestamp with random letters,
            because two runs could take the same number). The name is determined on first use: when the run begins,
            when something is written, or when `version` is read.
    """

    def __init__(self, root: str, name: str, version: int | str | None) -> None:
        self.root = root
        self.name = name
        self.fixed = f"version_{version}" if isinstance(version, int) else version
        """The directory's name if the user chose the name; None otherwise."""
        self._version = self.fixed
        self._claim: Callable[[], str] | None = None
        self._settled_by_run = False
        self.is_claimed = False
        """Whether a run has claimed the directory, or something was written to it."""

    @property
    def folder(self) -> Folder:
        """The run's directory, for reading and writing its files."""
        return folder_at(self.path)

    @property
    def is_local(self) -> bool:
        """Whether the directory is on a local file system, which can append to files."""
        return local_path(self.root) is not None

    @property
    def place(self) -> str:
        """The parent of the directories of all runs of this name."""
        return runs_folder_of(self.root, self.name)

    @property
    def asked(self) -> str | None:
        """The directory's name if it was fixed, read or written to before any run determined it; None otherwise."""
        return None if self._settled_by_run else self._version

    @property
    def version(self) -> str:
        """The name of the run's directory, which is determined at the latest when this property is read."""
        if self._version is None:
            self._version = free_version(self.place)
        return self._version

    def adopt(self, version: str) -> None:
        """Use the directory name that a run has claimed."""
        self._version, self._claim, self.is_claimed, self._settled_by_run = version, None, True, True

    def expect(self, version: str, claim: Callable[[], str] | None) -> None:
        """Use a directory name that has not been claimed yet.

        Args:
            version: the expected name, unless another run claims it first.
            claim: called at the first write; claims the directory for all loggers that share it, and returns its name.
                None if nothing will be written.
        """
        self._version, self._claim, self.is_claimed, self._settled_by_run = version, claim, False, True

    @property
    def path(self) -> str:
        """The run's directory, with the URL's scheme."""
        return child(self.place, self.version)

    def make(self) -> str:
        """Create the directory if needed, and return `path`.

        A directory without a fixed version is claimed, so that of two concurrent runs the second takes the next number.
        """
        if self.is_claimed or self.fixed is not None:
            self.folder.make()
        elif self._claim is not None:
            self._version = self._claim()
        else:
            with lock_folder(self.place):
                self._version = claim_version(self.place, self._version)
        self.is_claimed = True
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_claim": None}  # `_claim` cannot be pickled; a spawned process sets it again

    def file(self, name: str) -> str:
        """Return the path of the file ``name`` in this directory."""
        return child(self.path, name)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write ``values`` to the file ``name`` as JSON. Values that JSON cannot represent are written as text."""
        folder_at(self.make()).write(name, (json.dumps(dict(values), indent=2, default=str) + "\n").encode())


def runs_folder_of(root: str, name: str) -> str:
    """Return the parent of the directories of all runs with this name: ``<root>/<name>``."""
    if not name:
        return root.rstrip("/") or root
    return child(root, name) if root else name


def free_version(place: str) -> str:
    """Return a directory name that is not in use. The directory is not created, so another run may take the name."""
    root = local_path(place)
    return _time_name() if root is None else f"version_{_next_number(root)}"


def claim_version(place: str, announced: str | None = None, expected: str | None = None) -> str:
    """Create a directory that no other run uses, and return its name.

    Args:
        place: the parent folder, which is created if needed.
        announced: the name that was announced to the user. It is used if no such directory exists, or if the directory
            contains no run's record.
        expected: the name that `free_version` returned. It is used at a URL, where collisions cannot be detected.

    Raises:
        OSError: the directory cannot be created.
    """
    root = local_path(place)
    if root is None:  # object stores have no atomic directory creation
        return announced or expected or _time_name()
    os.makedirs(root, exist_ok=True)
    if announced is not None:
        path = os.path.join(root, announced)
        # An existing directory without a record may be used, because the user may have created it.
        if _make_new(path) or (os.path.isdir(path) and not os.path.lexists(os.path.join(path, RECORD))):
            return announced
    number = _next_number(root)
    while not _make_new(os.path.join(root, f"version_{number}")):
        number += 1
    return f"version_{number}"


def _make_new(path: str) -> bool:
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    return True


def _next_number(root: str) -> int:
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    matches = map(_VERSION.fullmatch, names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _time_name() -> str:
    letters = "".join(chr(ord("a") + byte % 26) for byte in os.urandom(_RANDOM_LETTERS))
    return f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{letters}"
