"""A file that is written from beginning to end, its checksums computed beside."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from drivetrain.checkpoint_format.checksums import BlockSums
from drivetrain.checkpoint_format.manifest import FileRecord

_IN_FLIGHT = 2  # portions that may wait for the disk while the next is gathered


class Sink(Protocol):
    """Where bytes go."""

    def write(self, content: Any, /) -> Any:
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
        self._pending: deque[tuple[Future[None], Future[None]]] = deque()

    def write(self, content: bytes | memoryview) -> None:
        """Write the next bytes, which must stay as they are until `finish`, or be nobody else's."""
        while len(self._pending) >= _IN_FLIGHT:
            self._wait_for_one()
        self._pending.append((self._writer.submit(self._put, content), self._summer.submit(self._sums.update, content)))

    def finish(self) -> FileRecord:
        """Wait until everything is written and return what the file has become."""
        while self._pending:
            self._wait_for_one()
        return FileRecord(self._sums.size, self._sums.text())

    def close(self) -> None:
        """End the threads."""
        self._writer.shutdown()
        self._summer.shutdown()

    def _put(self, content: bytes | memoryview) -> None:
        self._sink.write(content)

    def _wait_for_one(self) -> None:
        for future in self._pending.popleft():
            future.result()
