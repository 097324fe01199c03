"""Writes a file sequentially and computes its checksums in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from drivetrain._storage.folder import Sink
from drivetrain.checkpoint._format.checksums import DIGESTS, BlockChecksums
from drivetrain.checkpoint._format.manifest import FileRecord

MAX_WAITING_PIECES = 2
"""Number of temporary pieces that may wait for the disk while the next piece is gathered."""

_BATCH_BYTES = 16 * 2**20  # maximum number of bytes per write call, unless a single content is larger

_Content = bytes | memoryview


class FileWriter:
    """Writes a file in one thread and computes its checksums in another. Both threads release the GIL while they work.

    Args:
        sink: the destination, which the caller closes.
        digest: name of a digest in `DIGESTS`, which the thread of the checksums computes too; None for no digest.
    """

    def __init__(self, sink: Sink, digest: str | None = None) -> None:
        self._sink = sink
        self._checksums = BlockChecksums()
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        self._checksummer = ThreadPoolExecutor(1, "checkpoint-sum")
        self._digest: Any = None if digest is None else DIGESTS[digest]()
        self._waiting_contents: deque[_Content] = deque()
        self._last_write: Future[None] | None = None
        self._last_checksum: Future[None] | None = None
        self._temporary_pieces: deque[list[Future[None]]] = deque()
        self._error: Exception | None = None

    def write(self, content: _Content, borrowed: bool = False) -> None:
        """Queue the next bytes of the file. Contents that wait in the queue are written together.

        Args:
            content: the bytes, which must not change until `record` has returned.
            borrowed: whether the memory belongs to an existing tensor. If it does not, the call waits while
                `MAX_WAITING_PIECES` temporary pieces are queued.

        Raises:
            Exception: an earlier write failed.
        """
        while not borrowed and len(self._temporary_pieces) >= MAX_WAITING_PIECES:
            for future in self._temporary_pieces.popleft():
                future.result()
        self._raise_error()
        self._waiting_contents.append(content)
        self._last_write = self._writer.submit(self._run_unless_failed, self._write_waiting)
        self._last_checksum = self._checksummer.submit(self._run_unless_failed, self._add_to_checksums, content)
        if not borrowed:
            self._temporary_pieces.append([self._last_write, self._last_checksum])

    def flush(self) -> None:
        """Wait until all queued contents are written. Their checksums may still be in progress.

        Raises:
            Exception: a write failed.
        """
        if self._last_write is not None:
            self._last_write.result()
        self._raise_error()

    def record(self) -> FileRecord:
        """Wait until all contents are written and checksummed, and return the file's size, checksums and digest."""
        self.flush()
        if self._last_checksum is not None:
            self._last_checksum.result()
        self._raise_error()
        return FileRecord(
            self._checksums.size, self._checksums.text(), "" if self._digest is None else self._digest.hexdigest()
        )

    def close(self) -> None:
        """Stop the threads."""
        self._error = self._error or RuntimeError("the file was closed")
        self._writer.shutdown()
        self._checksummer.shutdown()

    def _write_waiting(self) -> None:
        batch: list[_Content] = []
        size = 0
        while self._waiting_contents and size < _BATCH_BYTES:
            batch.append(self._waiting_contents.popleft())
            size += len(batch[-1])
        if batch:  # it is empty if a previous call has written all waiting contents
            self._sink.writelines(batch)

    def _add_to_checksums(self, content: _Content) -> None:
        self._checksums.update(content)
        if self._digest is not None:
            self._digest.update(content)

    def _run_unless_failed(self, work: Callable[..., Any], *contents: _Content) -> None:
        if self._error is None:
            try:
                work(*contents)
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
