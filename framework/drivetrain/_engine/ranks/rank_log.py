"""A log file per rank for the framework's warnings and the rank's errors, in runs of several ranks.

A single rank writes no log, because its output is on the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
from logging.handlers import RotatingFileHandler
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from drivetrain._runs.run_folder import RunFolder

_LOGGER = logging.getLogger("drivetrain")

MAX_LOG_BYTES = 8 * 2**20
"""The size at which a log is rotated. One rotated file is kept."""


class RankLog(logging.Handler):
    """Within its ``with`` block, also writes this rank's log to ``<run folder>/logs/rank-N.log``.

    The log has the framework's warnings and this rank's errors. The first record creates the file. A full file is
    renamed to ``rank-N.log.1``, replacing an older one.

    Args:
        run: the run's folder.
        rank: this process's rank.
    """

    def __init__(self, run: RunFolder, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._run = run
        self._rank = rank
        self._file: RotatingFileHandler | None = None  # None before the first record

    @property
    def folder(self) -> str | None:
        """The local folder of all ranks' logs; None if the run writes no files or has no folder yet."""
        root = self._run.path
        return None if root is None or "://" in root else os.path.join(os.path.abspath(root), "logs")

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _LOGGER.removeHandler(self)
        if self._file is not None:
            self._file.close()

    def emit(self, record: logging.LogRecord) -> None:
        if _LOGGER.handlers == [self] and not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)  # `logging` itself uses lastResort only for loggers without a handler
        self._write(record)

    def add_failure(self, error: BaseException, traceback: str) -> None:
        """Write this rank's traceback, and add a note with the log's path to ``error``."""
        self._add(error, f"The run failed.\n{traceback}")

    def add_cause(self, cause: BaseException) -> None:
        """Write the failure of another rank that caused this rank's failure."""
        self._add(cause, f"The failure was caused by another rank:\n{cause}")

    def _add(self, error: BaseException, text: str) -> None:
        self._write(logging.makeLogRecord({"levelname": "ERROR", "msg": text.rstrip()}))
        if self._file is not None:
            error.add_note(f"Log: {self._file.baseFilename}")

    def _write(self, record: logging.LogRecord) -> None:
        folder = self.folder
        if self._file is None and folder is not None:
            path = os.path.join(folder, f"rank-{self._rank}.log")
            with contextlib.suppress(OSError):  # a run must not fail because of its log
                os.makedirs(folder, exist_ok=True)
                self._file = RotatingFileHandler(path, "a", MAX_LOG_BYTES, 1, "utf-8", errors="backslashreplace")
                self._file.setFormatter(logging.Formatter(f"%(asctime)s rank {self._rank}: %(levelname)s: %(message)s"))
        if self._file is not None:
            self._file.emit(record)
