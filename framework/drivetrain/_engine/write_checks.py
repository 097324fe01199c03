"""Checks before the first step that a run can write to its folders."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain.callback import Callback
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import Logger
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

_PROBE = ".drivetrain-probe"
"""The name of an object that is written and removed to test a store; if it cannot be removed, only one remains."""

FAILS_AT_FIRST_SAVE = "the run would train until its first save, and fail there."
FAILS_AT_FIRST_ROW = "it would fail at its first row."

_PAUSES = (0.5, 1.0, 2.0)  # seconds between attempts to write to a store, which may be busy


def check_writable_folders(strategy: Strategy, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> None:
    """Check that all ranks can write to their folders, without leaving files there. Collective.

    If objects can be written to a store but not removed, a warning is logged, and an empty object stays there.

    Args:
        strategy: connects the ranks.
        callbacks: the callbacks, with the folders that they will write to.
        loggers: the loggers, checked on rank 0.

    Raises:
        ConfigurationError: on every rank if a check fails; names the folder, its owner, the system's error and the
            ranks.
    """
    control = strategy.control
    # One check per node is enough, since its ranks see the same disks.
    problem = None
    if strategy.local_rank == 0:
        problem = next(_problems(callbacks, loggers if strategy.rank == 0 else []), None)
    (failing,) = control.agree("folders that can be written to", problem is not None)
    if not failing:
        return
    problems = {rank: found for rank, found in enumerate(control.gather_objects(problem)) if found is not None}
    what, why, fix = next(iter(problems.values()))
    where = f" (on rank(s) {list(problems)})" if control.world_size > 1 else ""
    raise ConfigurationError(f"{what}{where}.", why, fix)


def _problems(callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> Iterator[tuple[str, str, str]]:
    for callback in callbacks:
        for folder in callback.writes_to:
            if (problem := write_problem(folder)) is not None:
                name = type(callback).__name__
                fix = f"give {name} a dirpath that can be written to, or Fit a default_root_dir."
                yield f"{name} cannot write to {folder!r}: {problem}", FAILS_AT_FIRST_SAVE, fix
    for each in loggers:
        root = each.writes_to
        if root is not None and "://" not in root and (problem := write_problem(root)) is not None:
            name = type(each).__name__
            fix = f"give {name} a folder that can be written to, or Fit a default_root_dir; or logger=False."
            yield f"{name} cannot write to {root!r}: {problem}", FAILS_AT_FIRST_ROW, fix


def write_problem(folder: str) -> str | None:
    """Return why a folder cannot be written to or created, or None if no problem was found."""
    from drivetrain.checkpoint._format.storage import filesystem_of  # only runs that write anything

    try:
        filesystem, path = filesystem_of(folder)
    except CheckpointError as error:
        return error.what
    if filesystem is not None:
        return _object_problem(filesystem, path.rstrip("/"), folder)
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{path!r} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _object_problem(filesystem: Any, root: str, folder: str) -> str | None:
    """Return why no object can be written to ``root``, or None."""
    from drivetrain.checkpoint._format.object_file import make_folder

    path = f"{root}/{_PROBE}"
    for pause in (*_PAUSES, None):
        try:
            make_folder(filesystem, root)
            filesystem.pipe_file(path, b"")
            break
        except Exception as error:  # each store's library has its own errors
            if pause is None or isinstance(error, PermissionError | FileNotFoundError | NotImplementedError):
                return f"{type(error).__name__}: {error}"
            time.sleep(pause)
    try:
        filesystem.rm_file(path)
    except FileNotFoundError:
        pass  # another node has removed it
    except Exception as error:
        logger.warning(
            "%r lets objects be written and not removed (%s: %s): checkpoints that are no longer kept will stay there, "
            "and so will the empty object %r.",
            folder,
            type(error).__name__,
            error,
            _PROBE,
        )
    return None
