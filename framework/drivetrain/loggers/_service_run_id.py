"""The id that a service knows a run by, kept in the run's folder: a run that goes on there finds it again."""

from __future__ import annotations

import json

from drivetrain.errors import ConfigurationError
from drivetrain.runs._directory import RunDirectory


class ServiceRunId:
    """One file in a run's directory, ``{"run_id": ...}``.

    Args:
        directory: the run's.
        file: its name.
    """

    def __init__(self, directory: RunDirectory, file: str) -> None:
        self._directory = directory
        self._file = file

    def read(self) -> str | None:
        """Return the id; None where there is none.

        Raises:
            ConfigurationError: the file holds something else.
        """
        filesystem = self._directory.filesystem
        filesystem.invalidate_cache()
        path = self._directory.file(self._file)
        try:
            with filesystem.open(path, "r", encoding="utf-8") as stream:
                document = json.load(stream)
        except FileNotFoundError:
            return None
        except ValueError:
            document = None
        found = document.get("run_id") if isinstance(document, dict) else None
        if not isinstance(found, str):
            raise ConfigurationError(
                f"{path!r} does not say which run of the service goes on here.",
                "it holds no JSON object with a text 'run_id'.",
                "give the logger the run's id, or remove the file for a new run of the service.",
            )
        return found

    def write(self, run_id: str) -> None:
        """Keep ``run_id``."""
        self._directory.write_json(self._file, {"run_id": run_id})
