"""Checks before the first step that a run can write to its folders."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from drivetrain._runtime.working_directory import REMOVED, lacks_its_start
from drivetrain.callback import Callback, folders_of
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import Logger
from drivetrain.strategies.strategy import Strategy

_PROBE = ".drivetrain-probe"
"""The name of the object that is written to a store and removed to test the store. All tests use the same name."""

FAILS_AT_FIRST_SAVE = "the run would train until its first save, and fail there."
FAILS_AT_FIRST_ROW = "the run would fail at the first row that it logs."

_PAUSES = (0.5, 1.0, 2.0)  # seconds between attempts to write to a store that may be busy


def check_writable_folders(strategy: Strategy, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> None:
    """Check that all ranks can write to their folders, without leaving files there. Collective.

    If objects can be written to a store but not removed, an empty object stays there.

    Args:
        strategy: connects the ranks.
        callbacks: the callbacks, with the folders that they will write to.
        loggers: the loggers, checked on rank 0.

    Raises:
        ConfigurationError: a check failed. Every rank raises the error, which names the folder, the callback or logger
            that writes there, the system's error and the ranks.
    """
    control = strategy.control
    # One check per node is enough, because all ranks of a node see the same disks.
    problem = None
    if strategy.local_rank == 0:
        problem = next(_problems(callbacks, loggers if strategy.rank == 0 else []), None)
    (failing,) = control.count_flags("folders that can be written to", problem is not None)
    if not failing:
        return
    problems = {rank: found for rank, found in enumerate(control.gather_objects(problem)) if found is not None}
    what, why, fix = next(iter(problems.values()))
    ranks = f" (on rank(s) {list(problems)})" if control.world_size > 1 else ""
    raise ConfigurationError(f"{what}{ranks}.", why, fix)


def _problems(callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> Iterator[tuple[str, str, str]]:
    for callback in callbacks:
        for folder in folders_of([callback]):
            if (problem := write_problem(folder)) is not None:
                name = type(callback).__name__
                fix = f"give {name} a dirpath that can be written to, or Fit a default_root_dir."
                yield f"{name} cannot write to {folder!r}: {problem}", FAILS_AT_FIRST_SAVE, fix
    for each in loggers:
        root = each.save_dir
        if root is not None and "://" not in root and (problem := write_problem(root)) is not None:
            name = type(each).__name__
            fix = f"give {name} a folder that can be written to, or Fit a default_root_dir; or logger=False."
            yield f"{name} cannot write to {root!r}: {problem}", FAILS_AT_FIRST_ROW, fix


def write_problem(folder: str) -> str | None:
    """Return why a folder cannot be written to or created, or None if no problem was found."""
    from drivetrain.checkpoint._format.storage import filesystem_of  # only runs that write files need it

    try:
        filesystem, path = filesystem_of(folder)
    except CheckpointError as error:
        return error.what
    if filesystem is not None:
        return _object_problem(filesystem, path.rstrip("/"))
    if lacks_its_start(path):
        return REMOVED
    path = os.path.abspath(path)
    missing = []
    try:
        while not _exists(path):
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
    except ValueError as error:  # a NUL character
        return str(error)


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _object_problem(filesystem: Any, root: str) -> str | None:
    """Return why no object can be written to ``root``, or None."""
    from drivetrain.checkpoint._format.object_file import make_folder

    path = f"{root}/{_PROBE}"
    for pause in (*_PAUSES, None):
        try:
            make_folder(filesystem, root)
            filesystem.pipe_file(path, b"")
            break
        except Exception as error:  # the libraries of stores raise different errors
            if pause is None or isinstance(error, PermissionError | FileNotFoundError | NotImplementedError):
                return f"{type(error).__name__}: {error}"
            time.sleep(pause)
    with suppress(Exception):  # the store may permit writing alone, and another node may have removed the object
        filesystem.rm_file(path)
    return None
