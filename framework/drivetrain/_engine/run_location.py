"""Where a run's folder will be: a function of the arguments of `Fit`, except for the number in the folder's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from drivetrain._runs.directory import folder_name, runs_folder_of, split_folder
from drivetrain._storage.paths import child, resolve_folder
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import Logger

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore
    from drivetrain._runs.run_folder import RunFolder

DEFAULT_NAME = "drivetrain_logs"
"""The name of runs without loggers that write files."""


class RunLocation(NamedTuple):
    """The place of a run's folder, ``<root>/<name>/<version>``.

    Attributes:
        name: the run's name.
        version: the name of the folder if the user chose it; None for the next free number.
        runs_folders: ``<root>/<name>`` of the run, and after it those of the loggers with other roots, which get a
            folder of the same name and number there.
        logger: the first logger that writes files, whose root and name are the run's; None if there is none.
    """

    name: str
    version: str | None
    runs_folders: tuple[str, ...]
    logger: Logger | None

    @property
    def runs_folder(self) -> str:
        """The folder that contains the folders of runs of this name."""
        return self.runs_folders[0]


def locate(run: RunCore) -> RunLocation:
    """Return the place of a run's folder, whether or not the run writes one."""
    writing = [logger for logger in run.trainer.loggers if logger.save_dir is not None]
    if not writing:
        return RunLocation(DEFAULT_NAME, None, (runs_folder_of(run.trainer.default_root_dir, DEFAULT_NAME),), None)
    name = writing[0].name
    version = next(filter(None, (folder_name(logger.given_version) for logger in writing)), None)
    roots = dict.fromkeys(logger.save_dir or "" for logger in writing)
    return RunLocation(name, version, tuple(runs_folder_of(root, name) for root in roots), writing[0])


def check_loggers_apart(loggers: Sequence[Logger]) -> None:
    """Check that no two loggers of a class would write the same files.

    Raises:
        ConfigurationError: two loggers of a class have the same root, and thereby the same folder.
    """
    seen = set()
    for logger in loggers:
        if logger.save_dir is not None and type(logger).use_folder is not Logger.use_folder:
            writer = type(logger), resolve_folder(logger.save_dir)
            if writer in seen:
                raise ConfigurationError(
                    f"Two loggers of class {type(logger).__name__} have save_dir={logger.save_dir!r}.",
                    "loggers with the same save_dir write to the same folder, whatever their names are.",
                    "give one of them another save_dir.",
                )
            seen.add(writer)


def writers_of(run: RunCore, location: RunLocation) -> dict[str, str]:
    """Return the class names of what writes files in a run's folders, by the folder of runs; empty for no folder."""
    trainer = run.trainer
    if trainer.fast_dev_run or trainer.barebones:
        return {}
    if location.logger is not None:
        if run.stage == "predict":  # prediction logs nothing
            return {}
        writing = [logger for logger in trainer.loggers if logger.save_dir is not None]
        return {
            runs_folder_of(logger.save_dir or "", location.name): type(logger).__name__ for logger in reversed(writing)
        }
    if run.stage != "fit":
        return {}
    users = run.folder_users()
    return {location.runs_folder: type(users[0]).__name__} if users else {}


def hand_out(loggers: Sequence[Logger], folder: RunFolder) -> None:
    """Give each logger that writes files its folder: the run's, or below another root the one of the same name."""
    if folder.path is None:
        return
    version = split_folder(folder.path)[1]
    for logger in loggers:
        if logger.save_dir is not None:
            logger.use_folder(child(runs_folder_of(logger.save_dir, folder.name), version))
