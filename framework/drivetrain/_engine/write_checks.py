"""Checks before the first step that a run can write to its folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Self

from drivetrain._runtime.working_directory import REMOVED, lacks_its_start
from drivetrain.callback import Callback, folders_of
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import Logger
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._storage.folder import Folder

_PROBE = ".drivetrain-probe"
"""The name of the object that is written to a store and removed to test the store. All tests use the same name."""

_RETRIES = 3  # of writing to a store that may be busy


class Writer(NamedTuple):
    """What writes to a folder, for the error if that is impossible.

    Attributes:
        name: its class name.
        why: what would happen otherwise.
        fix: the way out.
    """

    name: str
    why: str
    fix: str

    @classmethod
    def logger(cls, logger: Logger) -> Self:
        """Describe a logger."""
        name = type(logger).__name__
        fix = f"give {name} a folder that can be written to, or Fit a default_root_dir; or pass logger=False."
        return cls(name, "the run would fail at the first row that it logs.", fix)

    @classmethod
    def callback(cls, callback: Callback) -> Self:
        """Describe a callback that chose a folder itself."""
        name = type(callback).__name__
        return cls(name, _FAILS_AT_SAVE, f"give {name} a dirpath that can be written to, or Fit a default_root_dir.")

    def refusal(self, folder: str, problem: str) -> tuple[str, str, str]:
        """Return the what, why and fix of the error for a folder that cannot be written to."""
        return f"{self.name} cannot write to {folder!r}: {problem}.", self.why, self.fix


_FAILS_AT_SAVE = "the run would train until its first save, and fail there."
_FIX_ROOT = "give Fit a default_root_dir that can be written to, "

DEFAULT_CHECKPOINT = Writer(
    "Checkpoint", _FAILS_AT_SAVE, f"{_FIX_ROOT}since run.json is there even with a dirpath for checkpoints."
)
"""A `Checkpoint` that writes to the run's folder."""

PROFILER = Writer(
    "The profiler", "the measurements would be lost at the end of the run.", f"{_FIX_ROOT}or the profiler a dirpath."
)


def check_writable_folders(strategy: Strategy, callbacks: Sequence[Callback]) -> None:
    """Check that all ranks can write to the folders of their callbacks, without leaving files there. Collective.

    If objects can be written to a store but not removed, an empty object stays there.

    Args:
        strategy: connects the ranks.
        callbacks: the callbacks, with the folders that they will write to.

    Raises:
        ConfigurationError: a check failed. Every rank raises the error, which names the folder, the callback that
            writes there, the system's error and the ranks.
    """
    control = strategy.control
    # One check per node is enough, because all ranks of a node see the same disks.
    problem = None
    if strategy.local_rank == 0:
        problem = first_refusal(
            (folder, Writer.callback(callback)) for callback in callbacks for folder in folders_of([callback])
        )
    (failing,) = control.count_flags("folders that can be written to", problem is not None)
    if not failing:
        return
    problems = {rank: found for rank, found in enumerate(control.gather_objects(problem)) if found is not None}
    what, why, fix = next(iter(problems.values()))
    ranks = f" (on rank(s) {list(problems)})" if control.world_size > 1 else ""
    raise ConfigurationError(f"{what.removesuffix('.')}{ranks}.", why, fix)


def first_refusal(writers: Iterable[tuple[str, Writer]]) -> tuple[str, str, str] | None:
    """Return the what, why and fix of the error for the first folder that cannot be written to; None if there is none.

    Args:
        writers: folders, each with what writes to it.
    """
    problems = ((folder, writer, write_problem(folder)) for folder, writer in writers)
    return next((writer.refusal(folder, problem) for folder, writer, problem in problems if problem is not None), None)


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
