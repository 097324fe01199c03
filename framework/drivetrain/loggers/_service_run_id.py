"""ServiceRunId: stores the id that a logging service gave to a run, so that a resumed run continues the run there."""

from __future__ import annotations

import json

from drivetrain.errors import ConfigurationError
from drivetrain.runs._directory import RunDirectory


class ServiceRunId:
    """A file in a run's directory with the content ``{"run_id": ...}``.

    Args:
        directory: the run's directory.
        file: the file's name.
    """

    def __init__(self, directory: RunDirectory, file: str) -> None:
        self._directory = directory
        self._file = file

    def read(self) -> str | None:
        """Return the id; None if there is no file.

        Raises:
            ConfigurationError: the file's content is invalid.
        """
        try:
            document = json.loads(self._directory.folder.read(self._file))
        except FileNotFoundError:
            return None
        except ValueError:
            document = None
        run_id = document.get("run_id") if isinstance(document, dict) else None
        if not isinstance(run_id, str):
            raise ConfigurationError(
                f"{self._directory.file(self._file)!r} does not contain the id of a run of the logging service.",
                "the file must contain a JSON object with a text 'run_id'.",
                "pass the id to the logger, or remove the file to start a new run in the service.",
            )
        return run_id

    def write(self, run_id: str) -> None:
        """Write ``run_id`` to the file."""
        self._directory.write_json(self._file, {"run_id": run_id})
