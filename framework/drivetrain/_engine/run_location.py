"""Where a run has its folder: in the place of its first logger with files, whose like share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from drivetrain._engine.write_checks import AT_THE_FIRST_ROW, AT_THE_FIRST_SAVE
from drivetrain.checkpoint._folders import child, resolve_folder
from drivetrain.loggers import Logger
from drivetrain.runs._directory import claim_version, free_version, lock_folder, make_directory, runs_folder_of
from drivetrain.runs._identity import class_path
from drivetrain.runs._record import Record

if TYPE_CHECKING:
    from drivetrain._engine.session_state import SessionState

DEFAULT_NAME = "drivetrain_logs"
"""What runs without loggers are called."""

_PROFILER = "The profiler"


class RunPlace(NamedTuple):
    """Where runs of one name have their folders.

    Attributes:
        path: the folder of these folders.
        fixed: the name that the user has given to the run's; None for any.
        asked: the name that somebody was told; None for none.
        evaluated: the name of the folder where this very `Fit` has evaluated: a new run shares it; None for none.
        whose: writes there, for errors.
        for_checkpoints: whether that is no logger.
    """

    path: str
    fixed: str | None
    asked: str | None
    whose: str
    for_checkpoints: bool = False
    evaluated: str | None = None


def place_of_run(run: SessionState) -> RunPlace | None:
    """Return where the run's folder will be; None where it has none."""
    trainer = run.trainer
    if trainer.fast_dev_run or trainer.barebones:
        return None
    first = first_with_files(trainer.loggers)
    if first is not None:
        place = place_of_logger(first, trainer.loggers)
        before = run.folder.before
        if before is not None and before.path is not None and not before.is_of_fit and is_in(first, before.path):
            # What this very Fit has evaluated beforehand is logged there already.
            place = place._replace(evaluated=before.path.rstrip("/").rpartition("/")[2])
        return place
    saves = any(one.wants_run_folder for one in run.callbacks)
    if not saves and not run.profiling.wants_folder:
        return None
    whose = "Checkpoint" if saves else _PROFILER
    return RunPlace(runs_folder_of(trainer.default_root_dir, DEFAULT_NAME), None, None, whose, for_checkpoints=saves)


def place_of_logger(first: Logger, loggers: Sequence[Logger]) -> RunPlace:
    """Return where a logger with files, and those that share its place, have their folder."""
    sharing = sharing_with(first, loggers)
    directories = [one.directory for one in sharing]
    # One that can neither be told a version nor has a directory to claim chooses by itself.
    fixed = [_own_version(one) if each is None else each.fixed for one, each in zip(sharing, directories, strict=True)]
    asked = [each.asked for each in directories if each is not None]
    assert first.writes_to is not None
    path = runs_folder_of(first.writes_to, first.name)
    return RunPlace(path, next(filter(None, fixed), None), next(filter(None, asked), None), type(first).__name__)


def _own_version(one: Logger) -> str | None:
    return one.version_name if type(one).adopt is Logger.adopt else None


def sharing_with(first: Logger, loggers: Sequence[Logger]) -> list[Logger]:
    """Return the loggers of the same root and name."""
    place = resolve_folder(runs_folder_of(first.writes_to or "", first.name))
    with_files = [one for one in loggers if one.writes_to is not None]
    return [one for one in with_files if resolve_folder(runs_folder_of(one.writes_to or "", one.name)) == place]


def where_runs_are(run: SessionState) -> str:
    """Return where the runs of this trainer's have their folders."""
    return place_of_logs(run).path


def place_of_logs(run: SessionState) -> RunPlace:
    """Return where a run of this trainer's that writes something has its folder."""
    first = first_with_files(run.trainer.loggers)
    if first is not None:
        return place_of_logger(first, run.trainer.loggers)
    return RunPlace(runs_folder_of(run.trainer.default_root_dir, DEFAULT_NAME), None, None, "")


def name_of(run: SessionState) -> str:
    """Return the name of a run: that of its first logger with files."""
    first = first_with_files(run.trainer.loggers)
    return DEFAULT_NAME if first is None else first.name


def first_with_files(loggers: Sequence[Logger]) -> Logger | None:
    """Return the logger whose place is the run's; None where none writes files."""
    return next((one for one in loggers if one.writes_to is not None), None)


# Loggers


def versions_before(record: Record | None, loggers: Sequence[Logger]) -> dict[int, str]:
    """Return the versions that loggers had in the run that goes on, by their indices here.

    Two of one class and name have their files at different roots: they are told apart by their order.
    """
    left, found = [] if record is None else record.loggers, {}
    for index, one in enumerate(loggers):
        like = next((each for each in left if each[0] == (class_path(type(one)), one.name)), None)
        if like is not None:
            left.remove(like)
            found[index] = like[1]
    return found


def claim_at_the_first_write(one: Logger, others: Sequence[Logger], note: Callable[[], None] = lambda: None) -> None:
    """Let a logger whose files are elsewhere than the run's have a directory that its like share.

    Args:
        one: the logger.
        others: all those that have no directory yet.
        note: called once it is known which one it is: another run may have been quicker.
    """
    if one.directory is None:
        return
    place = place_of_logger(one, others)
    sharing = [each.directory for each in sharing_with(one, others) if each.directory is not None]
    version = place.fixed or place.asked or free_version(place.path)

    @cache
    def claim() -> str:
        if place.fixed is not None:
            make_directory(child(place.path, place.fixed))
            return place.fixed
        with lock_folder(place.path):
            claimed = claim_version(place.path, place.asked, version)
        if claimed != version:
            for each in sharing:
                each.adopt(claimed)
            note()
        return claimed

    for each in sharing:
        each.expect(version, claim)


def is_in(one: Logger, folder: str) -> bool:
    """Whether a logger has a directory, and it is this one."""
    return one.directory is not None and one.directory.is_claimed and one.directory.path == folder


def cannot_write(place: RunPlace, problem: str) -> tuple[str, str, str]:
    """Return the what, why and fix of the error that says so."""
    if place.whose == _PROFILER:
        return (
            f"{place.whose} cannot write to {place.path!r}: {problem}.",
            "what it measures would be lost at the end of the run.",
            "give Fit a default_root_dir that can be written to, or the profiler a dirpath.",
        )
    return (
        f"{place.whose} cannot write to {place.path!r}: {problem}.",
        AT_THE_FIRST_SAVE if place.for_checkpoints else AT_THE_FIRST_ROW,
        "give Fit a default_root_dir that can be written to: a dirpath takes the checkpoints, and run.json is there."
        if place.for_checkpoints
        else f"give {place.whose} a folder that can be written to, or Fit a default_root_dir; or logger=False.",
    )
