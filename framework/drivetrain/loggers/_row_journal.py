"""RowJournal: copies of logged rows in the run's folder, for a service that may lose the last rows in a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from drivetrain.runs._directory import RunDirectory

_FLUSH_EVERY_N_ROWS = 100

Row = tuple[int, dict[str, float]]
"""The step of a row, and the row's values by name."""


class RowJournal:
    """A file in a run's local directory with one row per line, ``[step, {metric: value}]``.

    Args:
        directory: the run's directory.
        file: the file's name.
    """

    def __init__(self, directory: RunDirectory, file: str) -> None:
        self._directory = directory
        self._file = file
        self._pending: list[Row] = []  # rows that are not written yet

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Add a row. Rows are written in groups.

        Raises:
            OSError: writing failed, as in `save`. The row is still added.
        """
        self._pending.append((step, dict(row)))
        if len(self._pending) % _FLUSH_EVERY_N_ROWS == 0:
            self.save()

    def save(self) -> None:
        """Write the pending rows.

        Raises:
            OSError: writing failed. The rows stay pending, and the file is unchanged.
        """
        if not self._pending:
            return
        path = self._directory.file(self._file)
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        try:
            with open(path, "a", encoding="utf-8") as stream:
                stream.writelines(f"{json.dumps(row, default=float)}\n" for row in self._pending)
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)
            raise
        self._pending = []

    def rewind(self, step: int) -> list[Row]:
        """Remove the rows of steps after ``step``, and return the remaining rows."""
        self._pending = []
        path = self._directory.file(self._file)
        try:
            with open(path, encoding="utf-8") as stream:
                rows = [row for row in map(_parse_row, stream) if row is not None and row[0] <= step]
        except FileNotFoundError:
            return []
        temporary = f"{path}.new"
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps(row, default=float)}\n" for row in rows)
        os.replace(temporary, path)
        return rows


def _parse_row(line: str) -> Row | None:
    """Return the row in a line; None if the line was truncated by a kill."""
    try:
        step, row = json.loads(line)
        return int(step), dict(row)
    except (ValueError, TypeError):
        return None
