"""Checks before the first step that a run can write to its folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from drivetrain._runtime.working_directory import REMOVED, lacks_its_start
from drivetrain.callback import Callback, folders_of
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._storage.folder import Folder

_PROBE = ".drivetrain-probe"
"""The name of the object that is written to a store and removed to test the store. All tests use the same name."""

_RETRIES = 3  # of writing to a store that may be busy


def check_writable_folders(strategy: Strategy, callbacks: Sequence[Callback]) -> None:
    """Check that all ranks can write to the folders of their callbacks, without leaving files there. Collective.

    If objects can be written to a store but not removed, an empty object stays there.

    Args:
        strategy: connects the ranks.
        callbacks: the callbacks, with the folders that they will write to.

    Raises:
        ConfigurationError: a check failed. Every rank raises the error, which names the folder, the callback that
            writes there and the system's error.
    """
    # One check per node is enough, because all ranks of a node see the same disks.
    checking = callbacks if strategy.local_rank == 0 else ()
    problem = first_problem((folder, type(each).__name__) for each in checking for folder in folders_of([each]))
    for found in strategy.control.gather_objects(problem):
        if found is not None:
            raise unwritable(*found)


def first_problem(writers: Iterable[tuple[str, str]]) -> tuple[str, str, str] | None:
    """Return the first folder that cannot be written to, with its writer and the reason; None if there is none.

    Args:
        writers: folders, each with the class name of what writes to it.
    """
    problems = ((folder, writer, write_problem(folder)) for folder, writer in writers)
    return next(((folder, writer, problem) for folder, writer, problem in problems if problem is not None), None)


def unwritable(folder: str, writer: str, problem: str) -> ConfigurationError:
    """Return the error for a folder that ``writer`` cannot write to."""
    return ConfigurationError(
        f"{writer} cannot write to {folder!r}: {problem}.",
        "the run would fail when it first writes there.",
        f"give {writer} a folder that can be written to (dirpath, save_dir), or Fit a default_root_dir.",
    )


def write_problem(folder: str) -> str | None:
    """Return why a folder cannot be written to or created, or None if no problem was found."""
    from drivetrain._storage.paths import folder_at, local_path  # only runs that write files need it

    try:
        path = local_path(folder)
    except CheckpointError as error:
        return error.what
    if path is None:
        return _object_problem(folder_at(folder))
    if lacks_its_start(path):
        return REMOVED
    if "\0" in path:
        return "it contains a NUL character"
    path = os.path.abspath(path)
    missing = []
    try:
        while not os.path.lexists(path):
            path, name = os.path.split(path)
            missing.append(name)
        if not os.path.isdir(path):
            return f"{path!r} is not a folder"
        longest = os.pathconf(path, "PC_NAME_MAX")
        if too_long := [name for name in missing if len(os.fsencode(name)) > longest]:
            return f"{too_long[0]!r} is longer than {longest} bytes"
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _object_problem(folder: Folder) -> str | None:
    """Return why no object can be written to a folder at a URL, or None."""
    from drivetrain._storage.retries import retried

    def probe() -> None:
        folder.make()
        with folder.create(_PROBE):
            pass

    try:
        retried(probe, _RETRIES, permanent=(PermissionError, FileNotFoundError, NotImplementedError))
    except Exception as error:  # the libraries of stores raise different errors
        return f"{type(error).__name__}: {error}"
    with suppress(Exception):  # the store may permit writing alone, and another node may have removed the object
        folder.remove(_PROBE)
    return None
