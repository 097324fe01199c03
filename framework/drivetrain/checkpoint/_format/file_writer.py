"""A file that is written from beginning to end, its checksums computed beside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from drivetrain.checkpoint._format.checksums import BlockSums
from drivetrain.checkpoint._format.manifest import FileRecord

COPIES = 2
"""Pieces made for a file alone that may wait for the disk while the next is gathered."""

_TOGETHER = 16 * 2**20  # bytes that are written by one call, where as many wait

_Content = bytes | memoryview


class Sink(Protocol):
    """Where bytes go."""

    def writelines(self, contents: Sequence[_Content], /) -> Any:
        """Take the next bytes, all of them."""


class FileWriter:
    """Writes in one thread and sums in another: both leave the interpreter alone meanwhile.

    Args:
        sink: what the bytes are written to; closed by who opened it.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._sums = BlockSums()
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        self._summer = ThreadPoolExecutor(1, "checkpoint-sum")
        self._waiting: deque[_Content] = deque()
        self._written: Future[None] | None = None
        self._summed: Future[None] | None = None
        self._copies: deque[tuple[Future[None], Future[None]]] = deque()
        self._error: Exception | None = None

    def write(self, content: _Content, borrowed: bool = False) -> None:
        """Write the next bytes, together with what else waits for the disk.

        Args:
            content: must stay as it is until `record` has returned.
            borrowed: whether it is memory that is there anyway; of any other, only a few pieces may wait.

        Raises:
            Exception: what an earlier write raised.
        """
        while not borrowed and len(self._copies) >= COPIES:
            for future in self._copies.popleft():
                future.result()
        self._raise()
        self._waiting.append(content)
        self._written = self._writer.submit(self._do, self._write_waiting)
        self._summed = self._summer.submit(self._do, self._sums.update, content)
        if not borrowed:
            self._copies.append((self._written, self._summed))

    def flush(self) -> None:
        """Wait until everything is written; the sums may still be on their way, while the disk is at it.

        Raises:
            Exception: what a write raised.
        """
        if self._written is not None:
            self._written.result()
        self._raise()

    def record(self) -> FileRecord:
        """Return what the file has become, once everything is written and summed."""
        self.flush()
        if self._summed is not None:
            self._summed.result()
        self._raise()
        return FileRecord(self._sums.size, self._sums.text())

    def close(self) -> None:
        """End the threads."""
        self._error = self._error or RuntimeError("the file was closed")
        self._writer.shutdown()
        self._summer.shutdown()

    def _write_waiting(self) -> None:
        together: list[_Content] = []
        size = 0
        while self._waiting and size < _TOGETHER:
            together.append(self._waiting.popleft())
            size += len(together[-1])
        if together:  # else an earlier call took it along
            self._sink.writelines(together)

    def _do(self, work: Callable[..., Any], *contents: _Content) -> None:
        if self._error is None:
            try:
                work(*contents)
            except Exception as error:
                self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
