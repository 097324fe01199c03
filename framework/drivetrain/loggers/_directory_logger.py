"""DirectoryLogger: the base class of loggers that write to the run's directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain._config.secret_values import SecretFilter
from drivetrain._runtime.working_directory import resolved_path
from drivetrain.loggers.logger import Logger
from drivetrain.runs._directory import RunDirectory


class DirectoryLogger(Logger):
    """A logger whose files are in a `RunDirectory`.

    Args:
        save_dir: a local path or an fsspec URL.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the run's version.
        prefix: prepended to every metric's name, with a dash.
    """

    def __init__(self, save_dir: str | os.PathLike[str], name: str, version: int | str | None, prefix: str) -> None:
        self._directory = RunDirectory(resolved_path(save_dir), name, version)
        self._prefix = f"{prefix}-" if prefix else ""
        self._secret_filter = SecretFilter()

    @property
    def save_dir(self) -> str:
        """The local path or URL that contains the directories of runs. Reading this does not fix the version."""
        return self._directory.root

    @property
    def name(self) -> str:
        """The experiment's sub-directory."""
        return self._directory.name

    @property
    def version(self) -> int | str:
        """The run's number n if the directory is ``version_<n>``, else its name. Reading this fixes the version."""
        version = self._directory.version
        number = version.removeprefix("version_")
        return int(number) if number.isdecimal() and version == f"version_{int(number)}" else version

    @property
    def directory(self) -> RunDirectory:
        """The directory to which this logger writes."""
        return self._directory

    def adopt(self, version: str) -> None:
        """Use the version that the run has claimed."""
        self._directory.adopt(version)

    @property
    def log_dir(self) -> str:
        """The run's directory, which exists after the first write."""
        return self._directory.path


def flat_params(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each hyper-parameter, with those of nested mappings as ``outer/inner``."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from flat_params(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
