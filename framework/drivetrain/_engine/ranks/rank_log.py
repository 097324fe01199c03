"""A log file per rank for the framework's warnings and the rank's errors, in runs of several ranks.

A single rank writes no log, because its output is on the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from drivetrain._runs.run_folder import RunFolder

_LOGGER = logging.getLogger("drivetrain")

MAX_LOG_BYTES = 8 * 2**20
"""The size at which a log is rotated. One rotated file is kept."""


class RankLog:
    """Within its ``with`` block, also writes this rank's log to ``<run folder>/logs/rank-N.log``.

    The log has the framework's warnings and this rank's errors. The first record creates the file. A full file is
    renamed to ``rank-N.1.log``, replacing an older one.

    Args:
        run: the run's folder.
        rank: this process's rank.
    """

    def __init__(self, run: RunFolder, rank: int) -> None:
        self._run = run
        self._rank = rank
        self._handler: _Handler | None = None  # None outside the run, so that the object can be pickled
        self.path: str | None = None
        """The log file, once it has been written to."""

    @property
    def folder(self) -> str | None:
        """The local folder of all ranks' logs; None if the run writes no files or has no folder yet."""
        root = self._run.path
        return None if root is None or "://" in root else os.path.join(os.path.abspath(root), "logs")

    def __enter__(self) -> Self:
        self._handler = _Handler(self)
        _LOGGER.addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _LOGGER.removeHandler(self._handler)
            self._handler = None

    def add(self, text: str) -> None:
        """Append ``text`` to the log. Errors, such as a full disk, are ignored."""
        with contextlib.suppress(Exception):  # a run must not fail because of its log
            folder = self.folder
            if folder is None:
                return
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{self._rank}.log")
            record = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self._rank}: {text.rstrip()}\n".encode(
                errors="backslashreplace"
            )
            with contextlib.suppress(FileNotFoundError):
                if os.path.getsize(path) + len(record) > MAX_LOG_BYTES:
                    from drivetrain._storage.paths import folder_at  # few runs write logs that are full

                    folder_at(folder).rename(os.path.basename(path), f"rank-{self._rank}.1.log")
            with open(path, "ab") as file:  # records are rare, so no descriptor is kept open
                file.write(record)
            self.path = path

    def add_failure(self, error: BaseException, traceback: str) -> None:
        """Write this rank's traceback, and add a note with the log's path to ``error``."""
        self.add(f"The run failed.\n{traceback}")
        self._note_path(error)

    def add_cause(self, cause: BaseException) -> None:
        """Write the failure of another rank that caused this rank's failure."""
        self.add(f"The failure was caused by another rank:\n{cause}")
        self._note_path(cause)

    def _note_path(self, error: BaseException) -> None:
        if self.path is not None:
            error.add_note(f"Log: {self.path}")


class _Handler(logging.Handler):
    """Writes the framework's records to a `RankLog`."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if _LOGGER.handlers == [self] and not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)  # `logging` itself uses lastResort only for loggers without a handler
        self._log.add(self.format(record))
