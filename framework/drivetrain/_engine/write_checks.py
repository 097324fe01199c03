"""Folders that a run will write to, tried before its first step."""

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
"""An object that is put where checkpoints will be, and removed: of one name, so that there is one where none can be."""

AT_THE_FIRST_SAVE = "the run would train until its first save, and fail there."
AT_THE_FIRST_ROW = "it would fail at its first row."

_PAUSES = (0.5, 1.0, 2.0)  # seconds between tries of a store that refuses, which may be busy


def check_folders(strategy: Strategy, callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> None:
    """Refuse folders that cannot be written to, on every rank alike. It makes none, and leaves nothing. Collective.

    Where objects can be put and not removed, that is a warning: checkpoints that are no longer kept will stay there.

    Args:
        strategy: by which ranks tell each other.
        callbacks: those that will write.
        loggers: likewise, on rank 0.

    Raises:
        ConfigurationError: names the folder, whose it is, what the system says, and the ranks.
    """
    control = strategy.control
    # The ranks of a node see the same disks.
    found = None
    if strategy.local_rank == 0:
        found = next(_problems(callbacks, loggers if strategy.rank == 0 else []), None)
    (failing,) = control.agree("folders that can be written to", found is not None)
    if not failing:
        return
    problems = {rank: one for rank, one in enumerate(control.gather_objects(found)) if one is not None}
    what, why, fix = next(iter(problems.values()))
    where = f" (on rank(s) {list(problems)})" if control.world_size > 1 else ""
    raise ConfigurationError(f"{what}{where}.", why, fix)


def _problems(callbacks: Sequence[Callback], loggers: Sequence[Logger]) -> Iterator[tuple[str, str, str]]:
    for callback in callbacks:
        for folder in callback.writes_to:
            if (problem := why_not(folder)) is not None:
                name = type(callback).__name__
                fix = f"give {name} a dirpath that can be written to, or Fit a default_root_dir."
                yield f"{name} cannot write to {folder!r}: {problem}", AT_THE_FIRST_SAVE, fix
    for one in loggers:
        root = one.writes_to
        if root is not None and "://" not in root and (problem := why_not(root)) is not None:
            name = type(one).__name__
            fix = f"give {name} a folder that can be written to, or Fit a default_root_dir; or logger=False."
            yield f"{name} cannot write to {root!r}: {problem}", AT_THE_FIRST_ROW, fix


def why_not(folder: str) -> str | None:
    """Return what is in the way of writing to a folder, or of making it; None where nothing is to be seen."""
    from drivetrain.checkpoint._format.storage import filesystem_of  # by runs that keep something

    try:
        filesystem, path = filesystem_of(folder)
    except CheckpointError as error:
        return error.what
    if filesystem is not None:
        return _why_no_object(filesystem, path.rstrip("/"), folder)
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{path!r} is no folder"
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _why_no_object(filesystem: Any, root: str, folder: str) -> str | None:
    """What is in the way of putting an object there; None where nothing is."""
    from drivetrain.checkpoint._format.object_file import make_folder

    path = f"{root}/{_PROBE}"
    for pause in (*_PAUSES, None):
        try:
            make_folder(filesystem, root)
            filesystem.pipe_file(path, b"")
            break
        except Exception as error:  # each store's library has errors of its own
            if pause is None or isinstance(error, PermissionError | FileNotFoundError | NotImplementedError):
                return f"{type(error).__name__}: {error}"
            time.sleep(pause)
    try:
        filesystem.rm_file(path)
    except FileNotFoundError:
        pass  # another node was quicker
    except Exception as error:
        logger.warning(
            "%r lets objects be written and not removed (%s: %s): checkpoints that are no longer kept will stay there, "
            "and so does the empty object %r.",
            folder,
            type(error).__name__,
            error,
            _PROBE,
        )
    return None
