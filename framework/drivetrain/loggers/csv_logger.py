"""CSVLogger: metrics in one table that any spreadsheet or pandas opens, without a package to install."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.loggers._directory_logger import DirectoryLogger

_Row = dict[str, str]


class CSVLogger(DirectoryLogger):
    """Writes ``metrics.csv`` and ``hparams.json`` to ``<save_dir>/<name>/version_<n>``.

    The table's first column is ``step``; a metric that appears later becomes a new column, and what is already in the
    file (a resumed run, given the same ``version``) is kept. A row torn by a kill is dropped.

    Args:
        save_dir: a local path or an fsspec URL.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the first free number.
        prefix: put before every metric's name, with a dash.
        flush_logs_every_n_steps: rows are written once this many steps have passed since the last write; `save` and
            `finalize` write at once.

    Raises:
        ConfigurationError: ``flush_logs_every_n_steps`` is below 1.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str = "drivetrain_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ConfigurationError(
                f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps!r})",
                "rows are written every so many steps, so it must be at least 1",
                "give a count such as 100",
            )
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._columns: list[str] | None = None  # None until the file has been looked at
        self._pending: list[_Row] = []
        self._flushed_step: int | None = None
        # An object store cannot append: there the rows stay here and the file is written whole.
        self._written: list[_Row] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a row, or complete the last one where the step is the same and no value would be replaced."""
        if not metrics:
            return
        row = {"step": str(step)} | {f"{self._prefix}{key}": _text(value) for key, value in metrics.items()}
        last = self._pending[-1] if self._pending else None
        if last is not None and all(last.get(key, value) == value for key, value in row.items()):
            last.update(row)
        else:
            self._pending.append(row)
        if self._flushed_step is None:
            self._flushed_step = step
        if abs(step - self._flushed_step) >= self._flush_every:
            self.save()
            self._flushed_step = step

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``params`` to ``hparams.json``, without secrets."""
        self._directory.write_json("hparams.json", self._left_out.take_out(params)[0])

    def save(self) -> None:
        """Write the rows that are held back."""
        if not self._pending:
            return
        self._directory.make()
        if self._columns is None:
            self._take_up_existing()
        assert self._columns is not None
        known = set(self._columns)
        new = [key for key in dict.fromkeys(key for row in self._pending for key in row) if key not in known]
        self._columns += new
        if not self._directory.is_local:
            self._written += self._pending
            self._rewrite(self._written)
        elif new:
            self._rewrite([*self._read(), *self._pending])
        else:
            with self._directory.filesystem.open(self._path, "a", encoding="utf-8", newline="") as stream:
                stream.write(self._rows_as_text(self._pending))
        self._pending = []

    @property
    def _path(self) -> str:
        return self._directory.file("metrics.csv")

    def _take_up_existing(self) -> None:
        self._columns = ["step"]
        if not self._directory.filesystem.exists(self._path):
            return
        rows = self._read()
        self._columns = list(dict.fromkeys(["step", *(key for row in rows for key in row)]))
        if self._directory.is_local:
            self._rewrite(rows)  # a torn last line goes, and an older column order becomes ours
        else:
            self._written = rows

    def _read(self) -> list[_Row]:
        if not self._directory.filesystem.exists(self._path):
            return []
        with self._directory.filesystem.open(self._path, "r", encoding="utf-8", newline="") as stream:
            text = stream.read()
        whole = text[: text.rfind("\n") + 1]
        return [
            {key: value for key, value in row.items() if key is not None and value}
            for row in csv.DictReader(io.StringIO(whole))
        ]

    def _rewrite(self, rows: Iterable[_Row]) -> None:
        assert self._columns is not None
        header = ",".join(_quoted(column) for column in self._columns) + "\n"
        text = header + self._rows_as_text(rows)
        filesystem = self._directory.filesystem
        if not self._directory.is_local:
            with filesystem.open(self._path, "w", encoding="utf-8", newline="") as stream:
                stream.write(text)
            return
        # Written beside it and exchanged, so that a kill never loses the rows that were there.
        beside = f"{self._path}.new"
        with filesystem.open(beside, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        filesystem.mv(beside, self._path)

    def _rows_as_text(self, rows: Iterable[_Row]) -> str:
        assert self._columns is not None
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self._columns, restval="", lineterminator="\n")
        writer.writerows(rows)
        return buffer.getvalue()


def _text(value: float) -> str:
    return repr(int(value)) if isinstance(value, bool) else repr(value)


def _quoted(column: str) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([column])
    return buffer.getvalue()
