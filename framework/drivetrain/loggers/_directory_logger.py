"""DirectoryLogger: the base class of loggers that write to the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from drivetrain._config.secret_values import SecretFilter
from drivetrain._runs.directory import claim_version, folder_name, make_directory, runs_folder_of, split_folder
from drivetrain._runtime.working_directory import resolved_path
from drivetrain._storage.paths import child, folder_at, publish
from drivetrain.loggers.logger import Logger


class DirectoryLogger(Logger):
    """A logger that writes files to the run's folder.

    Args:
        save_dir: a local path or an fsspec URL.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the run's version.
        prefix: prepended to every metric's name, with a dash.
    """

    def __init__(self, save_dir: str | os.PathLike[str], name: str, version: int | str | None, prefix: str) -> None:
        self._root = resolved_path(save_dir, "save_dir")
        self._name = name
        self._given_version = version
        self._folder: str | None = None  # of the last run, or of what was logged without a run
        self._prefix = f"{prefix}-" if prefix else ""
        self._secret_filter = SecretFilter()

    @property
    def save_dir(self) -> str:
        """The local path or URL that contains the folders of runs."""
        return self._root

    @property
    def name(self) -> str:
        """The experiment's sub-directory."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The number n if the run's folder is ``version_<n>``, else its name. Before a run it is `given_version`."""
        if self._folder is None:
            return self._given_version
        name = split_folder(self._folder)[1]
        number = name.removeprefix("version_")
        return int(number) if number.isdecimal() and name == f"version_{int(number)}" else name

    @property
    def given_version(self) -> int | str | None:
        """The argument ``version``."""
        return self._given_version

    @property
    def log_dir(self) -> str | None:
        """The run's folder; None before a run, unless it has a given version or was written to without a run."""
        name = folder_name(self._given_version)
        return self._folder or (name and child(runs_folder_of(self._root, self._name), name))

    def use_folder(self, folder: str) -> None:
        """Use the folder of a run for this logger's files."""
        if folder != self.log_dir:
            self._leave_folder()
        self._folder = folder

    def _leave_folder(self) -> None:
        """Forget what this logger has written to its folder, because another folder comes next."""

    def make_folder(self) -> str:
        """Create the logger's folder if needed, and return its path or URL. Without a run, a free one is taken."""
        place = runs_folder_of(self._root, self._name)
        self._folder = self.log_dir or child(place, claim_version([place])[0])
        make_directory(self._folder)
        return self._folder

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write ``values`` to a file in the folder as JSON. Values that JSON cannot represent are written as text."""
        publish(self.make_folder(), name, f"{json.dumps(dict(values), indent=2, default=str)}\n".encode())

    def read_run_id(self, file: str) -> str | None:
        """Return the id that a service gave to the run of the folder, which a resumed run continues.

        Args:
            file: the name of a file with the content ``{"run_id": ...}``.

        Returns:
            The id; None if there is no file.
        """
        try:
            return str(json.loads(folder_at(self.make_folder()).read(file))["run_id"])
        except FileNotFoundError:
            return None


def flat_params(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each hyper-parameter, with those of nested mappings as ``outer/inner``."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from flat_params(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
