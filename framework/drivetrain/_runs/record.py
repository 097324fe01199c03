"""``run.json``: a run's configuration, liveness and outcome. docs/runs.md describes its fields."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from drivetrain._format.documents import parse_json
from drivetrain._runs.directory import RECORD
from drivetrain._runs.process import Job, Process
from drivetrain._storage.folder import StorageError
from drivetrain._storage.paths import child, folder_at

FORMAT = 1
_MAX_RECORD_BYTES = 2**26  # maximum size of a record; a larger file is not a record

RUNNING = "running"
FINISHED = "finished"
INTERRUPTED = "interrupted"
FAILED = "failed"


class Record(NamedTuple):
    """The content of a ``run.json`` when it was read.

    Attributes:
        folder: the run's folder, a path or URL.
        document: the JSON document.
    """

    folder: str
    document: dict[str, Any]

    @property
    def id(self) -> str:
        """The run's unique id."""
        return _text(self.document.get("id"))

    @property
    def name(self) -> str:
        """The name of the folder, such as ``version_3``."""
        return self.folder.rstrip("/").rpartition("/")[2]

    @property
    def is_training(self) -> bool:
        """Whether the run is or was a `fit`."""
        return self.document.get("stage") == "fit"

    @property
    def status(self) -> str:
        """The recorded status. It is ``running`` for a live run and for a run that was killed."""
        return _text(self.document.get("status"))

    @property
    def process(self) -> Process | None:
        """The process of rank 0."""
        return Process.from_json(self.document.get("process"))

    @property
    def jobs(self) -> list[Job]:
        """The cluster jobs that the process of rank 0 belonged to."""
        return Job.from_json(self.document.get("job"))

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The parts of the run, oldest first. Each start and each resume begins a part."""
        parts = self.document.get("parts")
        return [entry for entry in parts if isinstance(entry, dict)] if isinstance(parts, list) else []


def read(folder: str) -> Record | None:
    """Return the record in a folder; None if there is no valid record.

    Raises:
        StorageError: the record cannot be read.
    """
    try:
        content = folder_at(folder).read(RECORD, _MAX_RECORD_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise StorageError.unanswered(f"{child(folder, RECORD)!r} cannot be read", error) from error
    try:
        document = parse_json(content) if len(content) <= _MAX_RECORD_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT or not _text(document.get("id")):
        return None
    return Record(folder, document)


def write(folder: str, document: Mapping[str, Any]) -> None:
    """Write a record atomically, so that a reader gets either the previous record or the new record.

    Raises:
        OSError: the record cannot be written.
    """
    folder_at(folder).write(RECORD, encode_record(document))


def clear_leftovers(folder: str) -> None:
    """Remove temporary files of a killed writer. No other process may be writing the record."""
    folder_at(folder).clear_temporary(RECORD)


def archive_record(folder: str) -> str:
    """Rename the record of an earlier run to ``run-1.json``, ``run-2.json`` ..., and return the name.

    Raises:
        OSError: the record cannot be renamed.
    """
    files = folder_at(folder)
    existing, number = files.names(), 1
    while (name := f"run-{number}.json") in existing:
        number += 1
    files.rename(RECORD, name)
    return name


def encode_record(document: Mapping[str, Any]) -> bytes:
    """Return a record as JSON text."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def now() -> str:
    """Return the current UTC time in RFC 3339 format."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def plain(value: Any, depth: int = 0) -> Any:
    """Return a setting as a JSON-able value.

    An object is represented by its class name, and a number that JSON cannot represent is converted to text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str | os.PathLike):
        return str(value) if isinstance(value, str) else str(os.fspath(value))
    if isinstance(value, timedelta):
        return str(value)
    if depth < 8 and isinstance(value, Mapping):
        return {str(key): plain(part, depth + 1) for key, part in value.items()}
    if depth < 8 and isinstance(value, list | tuple | set | frozenset):
        return [plain(part, depth + 1) for part in value]
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
