"""A run's own directory, ``<root>/<name>/version_<n>``, made when something is written to it and not before."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint._folders import child
from drivetrain.checkpoint._format import local_storage
from drivetrain.checkpoint._format.storage import filesystem_of

if TYPE_CHECKING:
    import fsspec

_VERSION = re.compile(r"version_(\d{1,9})")
_LETTERS = 6

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints within it."""

RECORD = "run.json"
"""The file by which a directory is a run's."""


class RunDirectory:
    """The directory of one run below a local path or any fsspec URL.

    Args:
        root: a local path or a URL such as ``s3://bucket/logs``.
        name: the experiment's sub-directory; empty for none.
        version: a number, a directory name, or ``None`` for the first free number (at a URL, where two runs could take
            the same one, a time and random letters). It is settled when it is first needed: by the run, at a write, or
            when somebody asks for it.
    """

    def __init__(self, root: str, name: str, version: int | str | None) -> None:
        self.root = root
        self.name = name
        self.fixed = f"version_{version}" if isinstance(version, int) else version
        """The directory's name, where the user has given it one."""
        self._version = self.fixed
        self._claim: Callable[[], str] | None = None
        self._is_of_run = False  # a run has settled it
        self.is_claimed = False
        """Whether a run has the directory, or something was written to it."""

    @property
    def filesystem(self) -> fsspec.AbstractFileSystem:
        """The file system that `root` lives on."""
        import fsspec  # reads the entry points of every package there is, and a run that logs nothing need not wait

        return fsspec.core.url_to_fs(self.root)[0]

    @property
    def is_local(self) -> bool:
        """True where files are on a file system of this machine, which can append."""
        return filesystem_of(self.root)[0] is None

    @property
    def place(self) -> str:
        """Where the directories of all runs of this name are."""
        return runs_folder_of(self.root, self.name)

    @property
    def asked(self) -> str | None:
        """The version that somebody was told, or wrote to, before any run had it; None where nobody did."""
        return None if self._is_of_run else self._version

    @property
    def version(self) -> str:
        """The run's directory name; settles it."""
        if self._version is None:
            self._version = free_version(self.place)
        return self._version

    def adopt(self, version: str) -> None:
        """Settle the directory name on the one that a run has claimed."""
        self._version, self._claim, self.is_claimed, self._is_of_run = version, None, True, True

    def expect(self, version: str, claim: Callable[[], str] | None) -> None:
        """Settle the directory name on one that is not claimed yet.

        Args:
            version: what it will be, unless another run is quicker.
            claim: called at the first write: it claims the directory for all loggers that share it, and returns its
                name. None where nothing is written.
        """
        self._version, self._claim, self.is_claimed, self._is_of_run = version, claim, False, True

    @property
    def path(self) -> str:
        """The run's directory as the user would write it, with the URL's scheme."""
        return child(self.place, self.version)

    def make(self) -> str:
        """Create the directory if need be, and return `path`.

        A directory that nobody has been told of is claimed: where two runs start at once, the second takes the next.
        """
        if self.is_claimed or self.fixed is not None:
            make_directory(self.path)
        elif self._claim is not None:
            self._version = self._claim()
        else:
            with lock_folder(self.place):
                self._version = claim_version(self.place, self._version)
        self.is_claimed = True
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_claim": None}  # a process that a run starts is told anew

    def file(self, name: str) -> str:
        """The path of the file ``name`` in this directory."""
        return child(self.path, name)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write ``values`` to the file ``name``; what JSON does not know is written as its text."""
        self.make()
        with self.filesystem.open(self.file(name), "w", encoding="utf-8") as stream:
            json.dump(dict(values), stream, indent=2, default=str)
            stream.write("\n")


def runs_folder_of(root: str, name: str) -> str:
    """Return where the directories of all runs of a name are: ``<root>/<name>``."""
    if not name:
        return root.rstrip("/") or root
    return child(root, name) if root else name


def free_version(place: str) -> str:
    """Return the name of a directory that is not there yet. Nothing is made: another run may take it meanwhile."""
    filesystem, root = filesystem_of(place)
    return f"version_{_next_number(root)}" if filesystem is None else _time_name()


def claim_version(place: str, asked: str | None = None, expected: str | None = None) -> str:
    """Make a directory that no other run has, and return its name.

    Args:
        place: where; it is made if need be.
        asked: the name that the user was told: if it is free, or if the user has made it.
        expected: the name that `free_version` gave, which is taken where nothing tells whether it is still free.

    Raises:
        OSError: it cannot be made.
    """
    filesystem, root = filesystem_of(place)
    if filesystem is not None:  # a store has no directory whose making could fail for there being one
        return asked or expected or _time_name()
    os.makedirs(root, exist_ok=True)
    if asked is not None:
        path = os.path.join(root, asked)
        if _make_new(path) or (os.path.isdir(path) and not os.path.lexists(os.path.join(path, RECORD))):
            return asked  # whoever asked for it may have made it
    number = _next_number(root)
    while not _make_new(os.path.join(root, f"version_{number}")):
        number += 1
    return f"version_{number}"


@contextmanager
def lock_folder(place: str) -> Iterator[None]:
    """Keep other runs out that choose or claim a directory in ``place``, where it is on a local disk.

    Raises:
        OSError: it cannot be made, or written to.
    """
    filesystem, root = filesystem_of(place)
    if filesystem is not None:
        yield
        return
    os.makedirs(root, exist_ok=True)
    with local_storage.lock_folder(Path(root)):
        yield


def missing_directories(path: str) -> list[str]:
    """Return the directories that making a local one will make: itself and those above it, the innermost first."""
    filesystem, root = filesystem_of(path)
    missing: list[str] = []
    if filesystem is None:
        root = os.path.abspath(root)
        while not os.path.lexists(root):
            missing.append(root)
            root = os.path.dirname(root)
    return missing


def make_directory(path: str) -> None:
    """Make a directory, if it is not there."""
    filesystem, root = filesystem_of(path)
    if filesystem is None:
        os.makedirs(root, exist_ok=True)
    else:
        filesystem.makedirs(root, exist_ok=True)


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
    found = map(_VERSION.fullmatch, names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _time_name() -> str:
    letters = "".join(chr(ord("a") + byte % 26) for byte in os.urandom(_LETTERS))
    return f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}_{letters}"
