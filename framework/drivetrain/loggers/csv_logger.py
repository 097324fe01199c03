"""CSVLogger: metrics in one table that any spreadsheet or pandas opens, without a package to install."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.checkpoint._format.object_file import replaced
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.loggers._csv_table import Row, lines_of, table_of
from drivetrain.loggers._csv_table import text_of as text_of_table
from drivetrain.loggers._directory_logger import DirectoryLogger
from drivetrain.loggers._media_files import MediaFiles
from drivetrain.loggers.media import Histogram, Table, pixels_of, png_of, png_of_figure, text_of

_PAUSES = (0.5, 1.0, 2.0)  # seconds between tries where a store refuses
_FINAL = (PermissionError, ValueError, csv.Error)  # trying again changes nothing

_log = logging.getLogger("drivetrain")


class CSVLogger(DirectoryLogger):
    """Writes ``metrics.csv`` and ``hparams.json`` to ``<save_dir>/<name>/version_<n>``.

    The table's first column is ``step``; a metric that appears later becomes a new column, and what is already in the
    file (a run goes on in its folder) is kept. A row torn by a kill is dropped. A metric that is itself
    called ``step`` gets the column ``step.1``.

    Media are files, ``media/<key>/step=<n>.<kind>``: pictures and figures PNG (pictures need Pillow), texts plain,
    tables CSV, histograms JSON with ``counts`` and ``edges``.

    At a URL the table is put anew as a whole at each write, and it is tried for a few seconds where the store refuses.
    Rows that could not be written, there or on a disk that is full, are held back and written with the next ones: a
    warning says so, and the run goes on. `save`, `finalize` and `rewind` raise.

    Args:
        save_dir: a local path or an fsspec URL.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the run's folder.
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
        self._known: str | None = None  # the directory whose table the following is about
        self._columns: list[str] | None = None  # None until the file has been looked at
        self._pending: list[Row] = []
        self._flushed_step: int | None = None
        # An object store cannot append: there the rows stay here and the file is written whole.
        self._written: list[Row] = []
        self._size: int | None = None  # bytes to cut a local file to, where an append failed midway
        self._refused = False  # the last write failed
        # After a rewind: to which step, how many rows of the table are from before, and what came at that step again.
        self._rewound_to: int | None = None
        self._rows_before = 0
        self._come_again: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a row, or complete the last one where the step is the same and no value would be replaced."""
        if not metrics:
            return
        row = {"step": str(step)} | {self._column(key): _text(value) for key, value in metrics.items()}
        if step == self._rewound_to:
            self._come_again.update(row)
        last = self._pending[-1] if self._pending else None
        if last is not None and all(last.get(key, value) == value for key, value in row.items()):
            last.update(row)
        else:
            self._pending.append(row)
        if self._flushed_step is None:
            self._flushed_step = step
        if abs(step - self._flushed_step) >= self._flush_every:
            self._flushed_step = step
            self._save_or_warn()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``params`` to ``hparams.json``, without secrets."""
        self._directory.write_json("hparams.json", self._left_out.take_out(params)[0])

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Write a PNG file, where Pillow is installed."""
        if not is_installed("PIL"):
            self._cannot_keep("images without Pillow (pip install pillow)")
        else:
            self._write_file(key, step, "png", png_of(pixels_of(value)))

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Write a PNG file."""
        self._write_file(key, step, "png", png_of_figure(value))

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Write a JSON file with ``counts`` and ``edges``."""
        found = Histogram.of(value)
        document = {"counts": found.counts, "edges": found.edges, "left_out": found.left_out}
        self._write_file(key, step, "json", f"{json.dumps(document)}\n".encode())

    def log_text(self, key: str, value: str, step: int) -> None:
        """Write a text file."""
        self._write_file(key, step, "txt", text_of(value).encode())

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Write a CSV file."""
        table = Table.of(value)
        rows = [
            {column: "" if cell is None else str(cell) for column, cell in zip(table.columns, row, strict=True)}
            for row in table.rows
        ]
        self._write_file(key, step, "csv", text_of_table(table.columns, rows).encode())

    def _write_file(self, key: str, step: int, kind: str, content: bytes) -> None:
        MediaFiles(self._directory).write(f"{self._prefix}{key}", step, kind, content)

    def save(self) -> None:
        """Write the rows that are held back.

        Raises:
            DrivetrainError: the disk or the store refuses. The rows stay held back.
        """
        if self._pending:
            self._tried(self._write, _PAUSES)

    def rewind(self, step: int) -> None:
        """Take the rows of later steps out of the table, the columns that are empty then, and the media of later steps.

        Args:
            step: that of the checkpoint; -1 takes out all rows.

        Raises:
            DrivetrainError: the disk or the store refuses.
        """
        self._pending = [row for row in self._pending if not _is_after(row, step)]
        self._flushed_step = None
        self._turn_to(self._directory.path)
        self._rewound_to = step
        self._rows_before = 0
        self._come_again = set()
        self._tried(lambda: self._cut(step), _PAUSES)
        self._tried(lambda: MediaFiles(self._directory).rewind(step), _PAUSES)

    def _save_or_warn(self) -> None:
        """Write, in the course of a run: a store that refuses for an hour must not end a training of days."""
        refused_before = self._refused
        try:
            # Where it has refused before, each of the writes would wait.
            self._tried(self._write, () if refused_before else _PAUSES)
        except DrivetrainError as error:
            if not refused_before:
                _log.warning(
                    "%s The run goes on: the rows are held back, and written with the next ones or at its end.",
                    error.what,
                )

    def _tried(self, work: Callable[[], None], pauses: Sequence[float]) -> None:
        """Do what changes nothing of this object unless it comes to its end, several times where a store refuses."""
        for pause in (*pauses, None):
            try:
                work()
                self._refused = False
                return
            except Exception as error:  # each store's library has errors of its own
                self._refused = True
                if pause is None or isinstance(error, _FINAL) or self._directory.is_local:
                    raise DrivetrainError(
                        f"metrics.csv below {self.save_dir!r} cannot be brought up to date: "
                        f"{type(error).__name__}: {error}.",
                        "the rows that are not in it yet are held back in memory, and are lost with this process.",
                        "check the room there is, the rights, and for a URL the credentials and the network.",
                    ) from error
            time.sleep(pause)

    def _turn_to(self, path: str) -> None:
        """Forget the table of another run's directory, should that have been the last one."""
        if self._known not in (None, path):
            self._columns, self._written, self._size = None, [], None
            self._rewound_to, self._rows_before, self._come_again = None, 0, set()
        self._known = path

    def _write(self) -> None:
        self._turn_to(self._directory.make())
        if self._columns is None:
            self._take_up_existing()
        assert self._columns is not None
        columns = list(dict.fromkeys([*self._columns, *(key for row in self._pending for key in row)]))
        before = self._rows_before
        if not self._directory.is_local:
            there, before = self._without_what_came_again(self._written)
            rows = [*there, *self._pending]
            self._replace(text_of_table(columns, rows))
            self._written = rows
        elif self._come_again or columns != self._columns or not self._append(lines_of(columns, self._pending)):
            there, before = self._without_what_came_again(table_of(self._read() or "")[1])
            self._replace(text_of_table(columns, [*there, *self._pending]))
        self._columns = columns
        self._pending = []
        self._come_again, self._rows_before = set(), before

    def _without_what_came_again(self, rows: list[Row]) -> tuple[list[Row], int]:
        """Take values out of the rows from before the rewind that the run has logged anew since, at the same step.

        The checkpoint was written in the midst of that step's values: what came after it comes again.

        Returns:
            the rows, and how many of them are from before.
        """
        if not self._come_again:
            return rows, self._rows_before
        epoch = self._column("epoch")
        names = self._come_again - {"step", epoch}
        kept: list[Row] = []
        before = 0
        for index, row in enumerate(rows):
            if index < self._rows_before and _step_of(row) == self._rewound_to and not names.isdisjoint(row):
                row = {name: cell for name, cell in row.items() if name not in names}
                if row.keys() <= {"step", epoch}:
                    continue
            before += index < self._rows_before
            kept.append(row)
        return kept, before

    def _take_up_existing(self) -> None:
        text = self._read() or ""
        found, rows = table_of(text)
        columns = list(dict.fromkeys(["step", *found]))
        if self._directory.is_local:
            if text and (whole := text_of_table(columns, rows)) != text:
                self._replace(whole)  # a torn last line goes, and another program's way to write a table becomes ours
        else:
            self._written = rows
        self._columns = columns

    def _cut(self, step: int) -> None:
        text: str | None = None
        if self._columns is None or self._directory.is_local:
            text = self._read()
            if text is None:
                return
            found, rows = table_of(text)
        else:
            found, rows = self._columns, self._written
        kept = [row for row in rows if not _is_after(row, step)]
        self._rows_before = len(kept)
        filled = set().union(*kept)
        columns = ["step", *(one for one in found if one != "step" and (one in filled or len(kept) == len(rows)))]
        # After a write whose answer was lost, the store may have more than this object knows of.
        if len(kept) < len(rows) or (text is None and self._refused):
            self._replace(text_of_table(columns, kept))
            self._columns = columns
            if not self._directory.is_local:
                self._written = kept

    # The file

    @property
    def _path(self) -> str:
        """As the file system has it, without the URL's scheme."""
        return str(self._directory.filesystem._strip_protocol(self._directory.file("metrics.csv")))

    def _read(self) -> str | None:
        """Return the text that is there, None where no file is.

        fsspec's ``exists`` takes an error for no, and the rows of a store that refuses for a moment would be lost.
        """
        try:
            if self._directory.is_local:
                self._mend()
                with open(self._path, "rb") as stream:
                    content = stream.read()
            else:
                filesystem = self._directory.filesystem
                filesystem.invalidate_cache()
                content = filesystem.cat_file(self._path)
        except FileNotFoundError:
            return None
        return content.decode("utf-8-sig", "surrogateescape")  # what is no text comes back as it was

    def _replace(self, text: str) -> None:
        """Write the whole file: beside what is there, and exchanged, so that a kill or an error loses no rows."""
        content = text.encode("utf-8", "surrogateescape")
        if not self._directory.is_local:
            with replaced(self._directory.filesystem, self._path) as stream:
                stream.write(content)
            return
        beside = f"{self._path}.new"
        try:
            with open(beside, "wb") as stream:
                stream.write(content)
            os.replace(beside, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        self._size = None

    def _append(self, text: str) -> bool:
        """Write at the end of a local file; False where somebody has removed it."""
        try:
            self._mend()
            size = os.path.getsize(self._path)
        except FileNotFoundError:
            return False
        try:
            with open(self._path, "ab") as stream:
                stream.write(text.encode("utf-8", "surrogateescape"))
        except BaseException:
            self._size = size
            with contextlib.suppress(OSError):
                self._mend()
            raise
        return True

    def _mend(self) -> None:
        """Take off what an append has left that failed midway: its rows are written again."""
        if self._size is not None:
            if os.path.getsize(self._path) > self._size:
                os.truncate(self._path, self._size)
            self._size = None

    def _column(self, metric: str) -> str:
        name = f"{self._prefix}{metric}"
        return "step.1" if name == "step" else name


def _is_after(row: Row, step: int) -> bool:
    at = _step_of(row)
    return at is not None and at > step


def _step_of(row: Row) -> float | None:
    try:
        return float(row.get("step", ""))  # a spreadsheet may have written 20 as 20.0
    except ValueError:
        return None  # not of our making: a note by hand, say, and nobody knows of which step


def _text(value: object) -> str:
    if type(value) is float:
        return repr(value)
    if isinstance(value, int):
        return repr(int(value))
    # A subclass or another package's number has a repr of its own, "np.float64(0.1)" for one.
    return repr(float(value)) if isinstance(value, SupportsFloat) else repr(value)
