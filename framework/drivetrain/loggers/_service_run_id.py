"""The id that a logging service gave to a run, in a file, so that a resumed run continues the run of the service."""

from __future__ import annotations

import json

from drivetrain._storage.paths import child, folder_at
from drivetrain.errors import ConfigurationError


def read_run_id(folder: str, file: str) -> str | None:
    """Return the id in a file with the content ``{"run_id": ...}``; None if there is no file.

    Raises:
        ConfigurationError: the file's content is invalid.
    """
    try:
        document = json.loads(folder_at(folder).read(file))
    except FileNotFoundError:
        return None
    except ValueError:
        document = None
    run_id = document.get("run_id") if isinstance(document, dict) else None
    if not isinstance(run_id, str):
        raise ConfigurationError(
            f"{child(folder, file)!r} does not contain the id of a run of the logging service.",
            "the file must contain a JSON object with a text 'run_id'.",
            "pass the id to the logger, or remove the file to start a new run in the service.",
        )
    return run_id
