"""A file that is written from beginning to end, its checksums computed beside."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from drivetrain.checkpoint._format.checksums import DIGESTS, BlockChecksums
from drivetrain.checkpoint._format.manifest import FileRecord

MAX_WAITING_PIECES = 2
"""Pieces made for a file alone that may wait for the disk while the next is gathered."""

_BATCH_BYTES = 16 * 2**20  # bytes that are written by one call, where as many wait

_Content = bytes | memoryview


class Sink(Protocol):
    """Where bytes go."""

    def writelines(self, contents: Sequence[_Content], /) -> Any:
        """Take the next bytes, all of them."""


class FileWriter:
    """Writes in one thread and sums in another: both leave the interpreter alone meanwhile.

    Args:
        sink: what the bytes are written to; closed by who opened it.
        digest: one of `DIGESTS`, computed in a third thread; None for none.
    """

    def __init__(self, sink: Sink, digest: str | None = None) -> None:
        self._sink = sink
        self._sums = BlockChecksums()
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        self._checksummer = ThreadPoolExecutor(1, "checkpoint-sum")
        self._digest: Any = None if digest is None else DIGESTS[digest]()
        self._digester = None if digest is None else ThreadPoolExecutor(1, "checkpoint-digest")
        self._waiting: deque[_Content] = deque()
        self._written: Future[None] | None = None
        self._checksummed: Future[None] | None = None
        self._digested: Future[None] | None = None
        self._undigested: deque[_Content] = deque()
        self._digest_is_due = False  # a call that has not begun yet will take all that waits
        self._copies: deque[list[Future[None]]] = deque()
        self._error: Exception | None = None

    def write(self, content: _Content, borrowed: bool = False) -> None:
        """Write the next bytes, together with what else waits for the disk.

        Args:
            content: must stay as it is until `record` has returned.
            borrowed: whether it is memory that is there anyway; of any other, only a few pieces may wait.

        Raises:
            Exception: what an earlier write raised.
        """
        while not borrowed and len(self._copies) >= MAX_WAITING_PIECES:
            for future in self._copies.popleft():
                future.result()
        self._raise_error()
        self._waiting.append(content)
        self._written = self._writer.submit(self._run_unless_failed, self._write_waiting)
        self._checksummed = self._checksummer.submit(self._run_unless_failed, self._sums.update, content)
        at_work = [self._written, self._checksummed]
        if self._digester is not None:
            at_work.append(self._submit_digest(self._digester, content))
        if not borrowed:
            self._copies.append(at_work)

    def flush(self) -> None:
        """Wait until everything is written; the sums may still be on their way, while the disk is at it.

        Raises:
            Exception: what a write raised.
        """
        if self._written is not None:
            self._written.result()
        self._raise_error()

    def record(self) -> FileRecord:
        """Return what the file has become, once everything is written and summed."""
        self.flush()
        for future in (self._checksummed, self._digested):
            if future is not None:
                future.result()
        self._raise_error()
        return FileRecord(self._sums.size, self._sums.text(), "" if self._digest is None else self._digest.hexdigest())

    def close(self) -> None:
        """End the threads."""
        self._error = self._error or RuntimeError("the file was closed")
        self._writer.shutdown()
        self._checksummer.shutdown()
        if self._digester is not None:
            self._digester.shutdown()

    def _write_waiting(self) -> None:
        together: list[_Content] = []
        size = 0
        while self._waiting and size < _BATCH_BYTES:
            together.append(self._waiting.popleft())
            size += len(together[-1])
        if together:  # else an earlier call took it along
            self._sink.writelines(together)

    def _submit_digest(self, digester: ThreadPoolExecutor, content: _Content) -> Future[None]:
        """Have the digest go on with ``content``, and all that waits in one call: of small ones there may be many."""
        self._undigested.append(content)
        if self._digested is None or not self._digest_is_due:
            self._digest_is_due = True
            self._digested = digester.submit(self._run_unless_failed, self._digest_waiting)
        return self._digested

    def _digest_waiting(self) -> None:
        self._digest_is_due = False
        while self._undigested:
            self._digest.update(self._undigested.popleft())

    def _run_unless_failed(self, work: Callable[..., Any], *contents: _Content) -> None:
        if self._error is None:
            try:
                work(*contents)
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
