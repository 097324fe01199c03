"""Locates a run's folder: the folder of its first logger that writes files, or else a default one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from drivetrain._engine.write_checks import FAILS_AT_FIRST_ROW, FAILS_AT_FIRST_SAVE
from drivetrain.callback import WantsRunFolder
from drivetrain.checkpoint._folders import child, resolve_folder
from drivetrain.loggers import Logger
from drivetrain.runs._directory import claim_version, free_version, lock_folder, make_directory, runs_folder_of
from drivetrain.runs._identity import class_path
from drivetrain.runs._record import Record

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import RunCore

DEFAULT_NAME = "drivetrain_logs"
"""The name of runs without loggers."""

_PROFILER = "The profiler"


class RunLocation(NamedTuple):
    """The folder that contains the folders of runs of one name.

    Attributes:
        path: the path of the folder.
        fixed: the name that the user chose for this run's folder; None for any.
        asked: the name that user code has read from the logger before the run; None if it was not read.
        writer: the name, for errors, of the object that writes there: a logger's class, "Checkpoint" or "The profiler".
        for_checkpoints: whether the run needs the folder for checkpoints only, because no logger writes files.
        evaluated: the name of the folder that an earlier evaluation of the same `Fit` used, which the run shares; or
            None.
    """

    path: str
    fixed: str | None
    asked: str | None
    writer: str
    for_checkpoints: bool = False
    evaluated: str | None = None


def locate_run(run: RunCore) -> RunLocation | None:
    """Return where the run's folder will be; None if the run will have no folder."""
    trainer = run.trainer
    if trainer.fast_dev_run or trainer.barebones:
        return None
    first = first_with_files(trainer.loggers)
    if first is not None:
        place = locate_logger(first, trainer.loggers)
        before = run.folder.before
        if before is not None and before.path is not None and not before.is_of_fit and logs_into(first, before.path):
            # An evaluation by the same Fit has logged there already.
            place = place._replace(evaluated=before.path.rstrip("/").rpartition("/")[2])
        return place
    saves = any(isinstance(each, WantsRunFolder) and each.wants_run_folder for each in run.callbacks)
    if not saves and not run.profile_needs_folder:
        return None
    writer = "Checkpoint" if saves else _PROFILER
    return RunLocation(
        runs_folder_of(trainer.default_root_dir, DEFAULT_NAME), None, None, writer, for_checkpoints=saves
    )


def locate_logger(first: Logger, loggers: Sequence[Logger]) -> RunLocation:
    """Return where a logger that writes files, and the loggers that share its folder, write."""
    sharing = loggers_sharing_folder(first, loggers)
    directories = [logger.directory for logger in sharing]
    # A logger that can neither adopt a version nor claim a directory chooses its version itself.
    fixed = [
        _chosen_version(logger) if directory is None else directory.fixed
        for logger, directory in zip(sharing, directories, strict=True)
    ]
    asked = [directory.asked for directory in directories if directory is not None]
    assert first.save_dir is not None
    path = runs_folder_of(first.save_dir, first.name)
    return RunLocation(path, next(filter(None, fixed), None), next(filter(None, asked), None), type(first).__name__)


def _chosen_version(logger: Logger) -> str | None:
    return logger.version_name if type(logger).adopt is Logger.adopt else None


def loggers_sharing_folder(first: Logger, loggers: Sequence[Logger]) -> list[Logger]:
    """Return the loggers with the same root and name, which share a folder."""
    place = resolve_folder(runs_folder_of(first.save_dir or "", first.name))
    with_files = [logger for logger in loggers if logger.save_dir is not None]
    return [each for each in with_files if resolve_folder(runs_folder_of(each.save_dir or "", each.name)) == place]


def runs_folder(run: RunCore) -> str:
    """Return the folder that contains the folders of this trainer's runs."""
    return locate_logs(run).path


def locate_logs(run: RunCore) -> RunLocation:
    """Return where runs of this trainer have their folders, whether or not this one writes files."""
    first = first_with_files(run.trainer.loggers)
    if first is not None:
        return locate_logger(first, run.trainer.loggers)
    return RunLocation(runs_folder_of(run.trainer.default_root_dir, DEFAULT_NAME), None, None, "")


def run_name(run: RunCore) -> str:
    """Return the run's name: that of its first logger that writes files."""
    first = first_with_files(run.trainer.loggers)
    return DEFAULT_NAME if first is None else first.name


def first_with_files(loggers: Sequence[Logger]) -> Logger | None:
    """Return the first logger that writes files, whose folder is the run's; None if there is none."""
    return next((logger for logger in loggers if logger.save_dir is not None), None)


# Loggers


def previous_versions(record: Record | None, loggers: Sequence[Logger]) -> dict[int, str]:
    """Return the versions that the loggers had in the resumed run, by their indices in ``loggers``.

    Loggers are matched by class and name. Loggers of the same class and name (at different roots) are matched in order.
    """
    remaining, versions = [] if record is None else record.loggers, {}
    for index, logger in enumerate(loggers):
        match = next((saved for saved in remaining if saved[0] == (class_path(type(logger)), logger.name)), None)
        if match is not None:
            remaining.remove(match)
            versions[index] = match[1]
    return versions


def claim_at_first_write(logger: Logger, others: Sequence[Logger], note: Callable[[], None] = lambda: None) -> None:
    """Make a logger outside the run's folder claim a directory at its first write.

    Loggers with the same root and name share the directory.

    Args:
        logger: the logger.
        others: all loggers that have no directory yet.
        note: called if another run has claimed the expected version, so that the logger got another one.
    """
    if logger.directory is None:
        return
    place = locate_logger(logger, others)
    sharing = [each.directory for each in loggers_sharing_folder(logger, others) if each.directory is not None]
    version = place.fixed or place.asked or free_version(place.path)

    @cache
    def claim() -> str:
        if place.fixed is not None:
            make_directory(child(place.path, place.fixed))
            return place.fixed
        with lock_folder(place.path):
            claimed = claim_version(place.path, place.asked, version)
        if claimed != version:
            for directory in sharing:
                directory.adopt(claimed)
            note()
        return claimed

    for directory in sharing:
        directory.expect(version, claim)


def logs_into(logger: Logger, folder: str) -> bool:
    """Whether ``folder`` is the directory that the logger has claimed."""
    return logger.directory is not None and logger.directory.is_claimed and logger.directory.path == folder


def write_error(place: RunLocation, problem: str) -> tuple[str, str, str]:
    """Return the what, why and fix of the error for a folder that cannot be written to."""
    if place.writer == _PROFILER:
        return (
            f"{place.writer} cannot write to {place.path!r}: {problem}.",
            "the measurements would be lost at the end of the run.",
            "give Fit a default_root_dir that can be written to, or the profiler a dirpath.",
        )
    return (
        f"{place.writer} cannot write to {place.path!r}: {problem}.",
        FAILS_AT_FIRST_SAVE if place.for_checkpoints else FAILS_AT_FIRST_ROW,
        "give Fit a default_root_dir that can be written to, since run.json is there even with a dirpath for "
        "checkpoints."
        if place.for_checkpoints
        else f"give {place.writer} a folder that can be written to, or Fit a default_root_dir; or pass logger=False.",
    )
