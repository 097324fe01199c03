"""Rows that were handed to a store which may still lose them, kept in the run's folder until a run goes on there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress

from drivetrain.runs._directory import RunDirectory

_AT_ONCE = 100  # rows that are written together

Row = tuple[int, dict[str, float]]


class RowJournal:
    """One line a row, ``[step, {metric: value}]``, in a file of a run's local directory.

    Args:
        directory: the run's.
        file: its name.
    """

    def __init__(self, directory: RunDirectory, file: str) -> None:
        self._directory = directory
        self._file = file
        self._pending: list[Row] = []

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Take a row; those of many are written at once.

        Raises:
            OSError: as `save` does. The row is taken.
        """
        self._pending.append((step, dict(row)))
        if len(self._pending) % _AT_ONCE == 0:
            self.save()

    def save(self) -> None:
        """Write what is held back.

        Raises:
            OSError: the disk refuses. The rows stay held back, and the file is as it was.
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

    def cut(self, step: int) -> list[Row]:
        """Take out the rows of later steps, and return the others."""
        self._pending = []
        path = self._directory.file(self._file)
        try:
            with open(path, encoding="utf-8") as stream:
                rows = [row for row in map(_row, stream) if row is not None and row[0] <= step]
        except FileNotFoundError:
            return []
        beside = f"{path}.new"
        with open(beside, "w", encoding="utf-8") as stream:
            stream.writelines(f"{json.dumps(row, default=float)}\n" for row in rows)
        os.replace(beside, path)
        return rows


def _row(line: str) -> Row | None:
    """Return None for a line that a kill has torn."""
    try:
        step, row = json.loads(line)
        return int(step), dict(row)
    except (ValueError, TypeError):
        return None
