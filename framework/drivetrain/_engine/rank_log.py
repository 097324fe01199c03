"""What one rank of many has to say, kept in a file of its own: warnings, and how it failed."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from drivetrain._engine.run_folder import RunFolder

_LOGGER = logging.getLogger("drivetrain")

LARGEST = 8 * 2**20
"""Bytes of a log, after which another is begun; the one before is kept, and those before it are not."""
_LONGEST = 2**20  # characters of a record, of which the middle is left out beyond that


class RankLog:
    """Keeps warnings and errors of this rank, for the length of its ``with``, in ``<run's folder>/logs/rank-N.log``.

    The file is made by the first of them: a run in which nothing happens leaves none. What was shown before is shown
    still. A file that is full becomes ``rank-N.1.log``, in place of the one before, and another is begun.

    Args:
        run: the folder.
        rank: this one.
        world_size: among how many. One alone keeps nothing: what it has to say is on the terminal.
        otherwise: where ``logs`` is to be, where the run has no folder; None for nowhere.
    """

    def __init__(self, run: RunFolder, rank: int, world_size: int, otherwise: str | None = None) -> None:
        self._run = run
        self._otherwise = otherwise
        self._rank = rank
        self._keeps = world_size > 1
        self._handler: _Handler | None = None  # for the length of the run: a handler cannot be sent to other processes
        self._show: Any = None
        self.written: str | None = None
        """The file, once there is one."""

    @property
    def folder(self) -> str | None:
        """Where all ranks' logs are, on this machine; None where this run keeps none, or has no folder yet."""
        root = (self._run.path or self._otherwise) if self._keeps else None
        return None if root is None or "://" in root else os.path.join(os.path.abspath(root), "logs")

    def __enter__(self) -> Self:
        if self._keeps:
            self._handler = _Handler(self)
            _LOGGER.addHandler(self._handler)
            self._show, warnings.showwarning = warnings.showwarning, self._showwarning
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _LOGGER.removeHandler(self._handler)
            self._handler = None
        if warnings.showwarning == self._showwarning:
            warnings.showwarning = self._show
        self._show = None

    def add(self, text: str) -> None:
        """Write ``text`` as it is. Where that is impossible, as on a full disk, nothing is kept."""
        with contextlib.suppress(Exception):  # it is not for this that a run fails
            folder = self.folder
            if folder is None:
                return
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank-{self._rank}.log")
            record = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {self._rank}: {_shortened(text.rstrip())}\n".encode(
                errors="backslashreplace"
            )
            with contextlib.suppress(FileNotFoundError):
                if os.path.getsize(path) + len(record) > LARGEST:
                    os.replace(path, os.path.join(folder, f"rank-{self._rank}.1.log"))
            with open(path, "ab") as file:  # records are rare, and no descriptor is left open
                file.write(record)
            self.written = path

    def add_failure(self, error: BaseException, told: str) -> None:
        """Write how this rank failed, and where its threads are; the error then names the file."""
        if not self._keeps:
            return
        threads = ""
        with contextlib.suppress(OSError):  # no room for a temporary file
            threads = f"Threads, innermost call first:\n{_threads()}"
        self.add(f"The run failed.\n{told.rstrip()}\n{threads}")
        self._tell(error)

    def add_cause(self, cause: BaseException) -> None:
        """Write what this rank's failure only follows from."""
        self.add(f"It follows from this:\n{cause}")
        self._tell(cause)

    def _tell(self, error: BaseException) -> None:
        if self.written is not None:
            error.add_note(f"Log: {self.written}")

    def _showwarning(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        self._show(message, category, filename, lineno, *rest, **more)
        self.add(warnings.formatwarning(message, category, filename, lineno))


class _Handler(logging.Handler):
    """Passes the framework's records to a log."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if _LOGGER.handlers == [self] and not logging.getLogger().handlers and logging.lastResort is not None:
            logging.lastResort.handle(record)  # which shows what nobody takes, and we are somebody
        self._log.add(self.format(record))


def _shortened(text: str) -> str:
    more = len(text) - _LONGEST
    if more <= 0:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {more:,} characters are left out here ...\n{text[-half:]}"


def _threads() -> str:
    import faulthandler  # by whoever fails, and nobody else

    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
