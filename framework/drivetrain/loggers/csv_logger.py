"""CSVLogger: metrics in a CSV table, without further dependencies."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from drivetrain._config.argument_checks import check_count
from drivetrain._runtime.lazy_names import is_installed
from drivetrain._storage.paths import child, folder_at, local_path, publish
from drivetrain._storage.retries import retried
from drivetrain.errors import DrivetrainError
from drivetrain.loggers._directory_logger import DirectoryLogger
from drivetrain.loggers.media import Histogram, Table, pixels_of, png_of, png_of_figure

Row = dict[str, str]

_FILE = "metrics.csv"
_SENTINEL = "end\n"
_MEDIA = "media"
_UNSAFE = re.compile(r"[^\w.@+= -]")
_MEDIA_STEP = re.compile(r"/step=(\d+)\.\w+$")
_RETRIES = 3  # of writing to a remote store
_PERMANENT_ERRORS = (PermissionError, ValueError, csv.Error)  # Retrying does not help against these errors.

_log = logging.getLogger("drivetrain")


class CSVLogger(DirectoryLogger):
    """Writes ``metrics.csv`` and ``hparams.json`` to ``<save_dir>/<name>/version_<n>``.

    The table's first column is ``step``, and a metric that appears later becomes a new column. When a run resumes, the
    rows up to the checkpoint's step are kept, except for a row that a kill truncated. A metric that is
    named ``step`` gets the column ``step.1``.

    Media are written to files ``media/<key>/step=<n>.<kind>``. Images and figures are PNG files (images need Pillow),
    texts are plain text, tables are CSV files, and histograms are JSON files with ``counts`` and ``edges``.

    At a URL, each write replaces the whole table and is retried for a few seconds. Rows that cannot be written,
    at a URL or on a full disk, are kept in memory and written with later rows, and the run continues with a warning.
    `save`, `finalize` and `rewind` raise an error instead.

    Args:
        save_dir: a local path or an fsspec URL.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the run's version.
        prefix: prepended to every metric's name, with a dash.
        flush_logs_every_n_steps: the number of steps after which pending rows are written. `save` and `finalize` write
            them immediately.

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
        meaning = "the number of steps between two writes"
        check_count("CSVLogger", "flush_logs_every_n_steps", flush_logs_every_n_steps, 1, meaning)
        super().__init__(save_dir, name, version, prefix)
        self._is_local = local_path(self.save_dir) is not None  # and can append to files
        self._flush_every = flush_logs_every_n_steps
        self._columns: list[str] | None = None  # None until the file has been read
        self._pending: list[Row] = []  # rows that are not written yet
        self._flushed_step: int | None = None  # the step of the last write, or of the first row
        # The text of a file at a URL; None until the file has been read. An object store cannot append to a file, so
        # each write replaces the whole file.
        self._text: str | None = None
        self._write_failed = False
        # From a rewind to the next write: the step of the rewind, and the metrics that were logged again at that step.
        self._rewound_to: int | None = None
        self._rewritten_metrics: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a row, or extend the last row if it has the same step and no value would be replaced."""
        if not metrics:
            return
        row = {"step": str(step)} | {self._column(key): _format_number(value) for key, value in metrics.items()}
        if step == self._rewound_to:
            self._rewritten_metrics.update(row)
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
        self.write_json("hparams.json", self._secret_filter.take_out(params)[0])

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Write an image as a PNG file, if Pillow is installed."""
        if not is_installed("PIL"):
            self._warn_unsupported("images without Pillow (pip install pillow)")
        else:
            self._write_file(key, step, "png", png_of(pixels_of(value)))

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Write a figure as a PNG file."""
        self._write_file(key, step, "png", png_of_figure(value))

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Write a histogram as a JSON file with ``counts`` and ``edges``."""
        histogram = Histogram.of(value)
        document = {"counts": histogram.counts, "edges": histogram.edges, "left_out": histogram.left_out}
        self._write_file(key, step, "json", f"{json.dumps(document)}\n".encode())

    def log_text(self, key: str, value: str, step: int) -> None:
        """Write a text as a text file."""
        self._write_file(key, step, "txt", value.encode())

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Write a table as a CSV file."""
        table = Table.of(value)
        self._write_file(key, step, "csv", "".join(map(_format_row, [table.columns, *table.rows])).encode())

    def _write_file(self, key: str, step: int, kind: str, content: bytes) -> None:
        _write_media(self.make_folder(), f"{self._prefix}{key}", step, kind, content)

    def save(self) -> None:
        """Write the pending rows.

        Raises:
            DrivetrainError: writing failed. The rows stay pending.
        """
        if self._pending:
            self._retry(self._write)

    def rewind(self, step: int) -> None:
        """Remove the rows and media of steps after ``step``, and the columns that become empty.

        Args:
            step: the checkpoint's step; -1 removes all rows.

        Raises:
            DrivetrainError: writing failed.
        """
        self._pending = [row for row in self._pending if not _is_after(row, step)]
        self._flushed_step = None
        folder = self.log_dir
        if folder is None:
            return
        self._rewound_to, self._rewritten_metrics = step, set()
        self._retry(lambda: self._drop_rows_after(step))
        self._retry(lambda: _remove_media_after(folder, step))

    def _save_or_warn(self) -> None:
        """Write the pending rows, with a warning instead of an error, because a failure must not end the training."""
        failed_before = self._write_failed
        try:
            # After a failure, a write is not retried, because retries would delay the run at each write.
            self._retry(self._write, 0 if failed_before else _RETRIES)
        except DrivetrainError as error:
            if not failed_before:
                _log.warning(
                    "%s The run continues: the rows are kept in memory and written with later rows or at the end of "
                    "the run.",
                    error.what,
                )

    def _retry(self, action: Callable[[], None], retries: int = _RETRIES) -> None:
        """Call ``action``, and call it again after pauses if a remote store fails.

        ``action`` must not change this object unless it succeeds.
        """
        try:
            retried(action, 0 if self._is_local else retries, _PERMANENT_ERRORS)
            self._write_failed = False
        except Exception as error:
            self._write_failed = True
            raise DrivetrainError(
                f"metrics.csv below {self.save_dir!r} cannot be written: {type(error).__name__}: {error}.",
                "the missing rows are kept in memory, and are lost when this process ends.",
                "check the free space, the permissions, and for a URL the credentials and the network.",
            ) from error

    def _leave_folder(self) -> None:
        self._columns = self._text = None
        self._rewound_to, self._rewritten_metrics = None, set()

    def _write(self) -> None:
        self.make_folder()
        names = dict.fromkeys(name for row in self._pending for name in row)
        if (
            self._columns is None
            or self._rewritten_metrics
            or not names.keys() <= set(self._columns)
            or not self._append(_format_rows(self._columns, self._pending))
        ):
            columns, rows = _parse_table(self._read())
            columns = list(dict.fromkeys(["step", *(self._columns or columns), *names]))
            self._replace(_format_table(columns, [*self._without_rewritten(rows), *self._pending]))
            self._columns = columns
        self._pending = []
        self._rewound_to, self._rewritten_metrics = None, set()

    def _without_rewritten(self, rows: list[Row]) -> Iterator[Row]:
        """Yield the rows without the values that the run has logged again at the rewind's step.

        Such values exist if the checkpoint was written between two calls of `log_metrics` for that step, because the
        resumed run repeats the later calls.
        """
        epoch = self._column("epoch")
        names = self._rewritten_metrics - {"step", epoch}
        for row in rows:
            if names.isdisjoint(row) or _step_of(row) != self._rewound_to:
                yield row
            elif not row.keys() <= names | {"step", epoch}:
                yield {name: cell for name, cell in row.items() if name not in names}

    def _drop_rows_after(self, step: int) -> None:
        columns, rows = _parse_table(self._read())
        kept = [row for row in rows if not _is_after(row, step)]
        # After a failed write, the store may contain more than this object knows.
        if len(kept) < len(rows) or (self._text is not None and self._write_failed):
            filled = set().union(*kept)
            columns = ["step", *(column for column in columns if column in filled - {"step"})]
            self._replace(_format_table(columns, kept))
            self._columns = columns

    # Read and write the file

    def _read(self) -> str:
        """Return the file's text; "" if there is no file. A text at a URL is read once."""
        if self._text is not None:
            return self._text
        try:
            content = folder_at(self.log_dir or "").read(_FILE)
        except FileNotFoundError:
            content = b""
        text = content.decode("utf-8-sig", "surrogateescape")  # Invalid bytes are written back unchanged.
        if not self._is_local:
            self._text = text
        return text

    def _replace(self, text: str) -> None:
        """Replace the file atomically, so that a kill or an error loses no rows."""
        folder_at(self.log_dir or "").write(_FILE, text.encode("utf-8", "surrogateescape"))
        if not self._is_local:
            self._text = text

    def _append(self, text: str) -> bool:
        """Append ``text`` to the file; return False if the local file no longer exists."""
        if self._text is not None:
            self._replace(self._text + text)
            return True
        path = local_path(child(self.log_dir or "", _FILE))
        assert path is not None  # at a URL, `_text` is known
        try:
            size = os.path.getsize(path)
        except FileNotFoundError:
            return False
        try:
            with open(path, "ab") as stream:
                stream.write(text.encode("utf-8", "surrogateescape"))
        except BaseException:
            self._columns = None  # the next write reads the file, and drops what remains of a partial row
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise
        return True

    def _column(self, metric: str) -> str:
        name = f"{self._prefix}{metric}"
        return "step.1" if name == "step" else name


def _is_after(row: Row, step: int) -> bool:
    row_step = _step_of(row)
    return row_step is not None and row_step > step


def _step_of(row: Row) -> float | None:
    try:
        return float(row.get("step", ""))  # A spreadsheet may have written 20 as 20.0.
    except ValueError:
        return None  # The row was not written by this logger.


def _format_number(value: float) -> str:
    return repr(int(value) if isinstance(value, int) else float(value))


# The text of the table


def _parse_table(text: str) -> tuple[list[str], list[Row]]:
    """Return a table's columns, and the table's rows without empty cells.

    Text after the last line break, and a last row that ends within quotes, were truncated by a kill and are ignored.
    """
    # The last parsed row is dropped. It is the sentinel alone or, if the row before the sentinel has an unclosed quote,
    # this row and the sentinel.
    text = text[: text.rfind("\n") + 1] + _SENTINEL
    *records, _ = csv.reader(io.StringIO(text))
    columns, *rows = records or [[]]
    return list(dict.fromkeys(columns)), [
        {column: cell for column, cell in zip(columns, row, strict=False) if cell} for row in rows if row
    ]


def _format_table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the text of a table with a header row."""
    return _format_row(columns) + _format_rows(columns, rows)


def _format_rows(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the text of rows without a header row."""
    return "".join(_format_row([row.get(column, "") for column in columns]) for row in rows)


def _format_row(cells: Sequence[Any]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\r\n").writerow(cells)  # quotes cells that contain a character of "\r\n"
    return f"{stream.getvalue()[:-2]}\n"


# Media in the logger's folder, as files ``media/<key>/step=<n>.<kind>``


def _write_media(folder: str, key: str, step: int, kind: str, content: bytes) -> None:
    """Write a media file, replacing a file of the same key and step.

    Args:
        folder: the logger's folder, a path or URL.
        key: the name of the media. Slashes separate folders, and characters that are unsafe in file names become
            underscores.
        step: the optimizer step.
        kind: the file's extension, without a dot.
        content: the file's content.
    """
    parts = [_UNSAFE.sub("_", part) for part in key.split("/")]
    path = "/".join([_MEDIA, *(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)])
    publish(folder, f"{path}/step={step}.{kind}", content)


def _remove_media_after(folder: str, step: int) -> None:
    """Remove the media files of steps after ``step``."""
    files = folder_at(folder)
    for path in files.find(_MEDIA):
        match = _MEDIA_STEP.search(path)
        if match is not None and int(match[1]) > step:
            files.remove(path)
