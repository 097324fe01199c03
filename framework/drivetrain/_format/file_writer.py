"""Writes a file sequentially and computes its checksums in parallel."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from drivetrain._format.checksums import BLOCK, crc32
from drivetrain._format.manifest import FileRecord
from drivetrain._storage.folder import Content, Sink

_BUFFERS = 3  # two may wait for the disk while the next one is filled
_BATCH_BYTES = 16 * 2**20  # maximum number of bytes per write call, unless a single content is larger


@contextmanager
def file_writer(file: AbstractContextManager[Sink], hash_algorithm: str | None = None) -> Iterator[FileWriter]:
    """Yield a writer of ``file``, which is complete, and whose `FileWriter.record` is known, once the context exits.

    Args:
        file: the file, which is closed.
        hash_algorithm: name of a hash of `hashlib` that is computed of the file too; None for none.
    """
    with file as sink:
        writer = FileWriter(sink, hash_algorithm)
        try:
            yield writer
            writer.flush()
        except BaseException:
            writer.close()
            raise
    try:
        writer.finish()  # the last checksums are computed while the file is synced
    finally:
        writer.close()


def write_whole_file(
    file: AbstractContextManager[Sink], content: Content, hash_algorithm: str | None = None
) -> FileRecord:
    """Write a file that consists of ``content``, and return its record. Arguments are those of `file_writer`."""
    with file_writer(file, hash_algorithm) as writer:
        writer.write(content)
    return writer.record


class FileWriter:
    """Writes a file in one thread and computes its checksums in another. Both threads release the GIL while they work.

    Args:
        sink: the destination, which the caller closes.
        hash_algorithm: see `file_writer`.
    """

    def __init__(self, sink: Sink, hash_algorithm: str | None = None) -> None:
        self._sink = sink
        self._checksums = BlockChecksums()
        self._hash = None if hash_algorithm is None else hashlib.new(hash_algorithm)
        self._writer = ThreadPoolExecutor(1, "checkpoint-write")
        self._checksummer = ThreadPoolExecutor(1, "checkpoint-sum")
        self._waiting_contents: deque[Content] = deque()
        self._last_write: Future[None] | None = None
        self._last_checksum: Future[None] | None = None
        self._buffers = deque([torch.empty(0, dtype=torch.uint8)] * _BUFFERS)
        self._uses: deque[list[Future[None]]] = deque([[]] * _BUFFERS)  # of the buffers, by what was queued last
        self._error: Exception | None = None
        self.record = FileRecord(0, "")
        """The file's size, checksums and hash, once the file is complete."""

    def write(self, content: Content) -> None:
        """Queue the next bytes of the file. Contents that wait in the queue are written together.

        Args:
            content: the bytes, which must not change until the file is complete.

        Raises:
            Exception: an earlier write failed.
        """
        self._raise_error()
        self._waiting_contents.append(content)
        self._last_write = self._writer.submit(self._run_unless_failed, self._write_waiting)
        self._last_checksum = self._checksummer.submit(self._run_unless_failed, self._add_to_checksums, content)

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Yield memory to fill with the next bytes of the file, which are queued when the context exits.

        The call waits until the memory's earlier content is written. With memory of its own for each content, the
        allocator would hold several times as much.
        """
        for future in self._uses.popleft():
            future.result()
        buffer = self._buffers.popleft()
        if buffer.numel() < nbytes:
            del buffer  # free the memory before more is allocated
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._buffers.append(buffer)
        yield buffer[:nbytes]
        self.write(memoryview(buffer.numpy())[:nbytes])  # type: ignore[arg-type]
        self._uses.append([future for future in (self._last_write, self._last_checksum) if future is not None])

    def flush(self) -> None:
        """Wait until all queued contents are written. Their checksums may still be in progress.

        Raises:
            Exception: a write failed.
        """
        if self._last_write is not None:
            self._last_write.result()
        self._raise_error()

    def finish(self) -> None:
        """Wait until all contents are written and checksummed, and set `record`."""
        self.flush()
        if self._last_checksum is not None:
            self._last_checksum.result()
        self._raise_error()
        sha256 = "" if self._hash is None else self._hash.hexdigest()
        self.record = FileRecord(self._checksums.size, self._checksums.text(), sha256)

    def close(self) -> None:
        """Stop the threads."""
        self._error = self._error or RuntimeError("the file was closed")
        self._writer.shutdown()
        self._checksummer.shutdown()

    def _write_waiting(self) -> None:
        batch: list[Content] = []
        size = 0
        while self._waiting_contents and size < _BATCH_BYTES:
            batch.append(self._waiting_contents.popleft())
            size += len(batch[-1])
        if batch:  # it is empty if a previous call has written all waiting contents
            self._sink.writelines(batch)

    def _add_to_checksums(self, content: Content) -> None:
        self._checksums.update(content)
        if self._hash is not None:
            self._hash.update(content)

    def _run_unless_failed(self, work: Callable[..., Any], *contents: Content) -> None:
        if self._error is None:
            try:
                work(*contents)
            except Exception as error:
                self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class BlockChecksums:
    """Computes the checksum of each block of a file, given its bytes in order, in chunks of any size."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._finished_blocks: list[str] = []
        self._block_checksum = 0
        self._block_bytes = 0
        self.size = 0

    def update(self, content: bytes | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(content)
        self.size += len(view)
        while len(view):
            chunk = view[: self._block - self._block_bytes]
            self._block_checksum = crc32(chunk, self._block_checksum)
            self._block_bytes += len(chunk)
            view = view[len(chunk) :]
            if self._block_bytes == self._block:
                self._close()

    def text(self) -> str:
        """Return the concatenated checksums, eight hexadecimal digits per block. The last block may be shorter."""
        if self._block_bytes:
            self._close()
        return "".join(self._finished_blocks)

    def _close(self) -> None:
        self._finished_blocks.append(f"{self._block_checksum:08x}")
        self._block_checksum = self._block_bytes = 0
