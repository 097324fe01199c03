"""Tensors in files, read by the part: only the blocks that are touched are read, and each is checked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from drivetrain._distributed.shards import Region, Span
from drivetrain.checkpoint._format.checksums import crc32
from drivetrain.checkpoint._format.folder import Folder, Source
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.pieces import as_rows, row_size
from drivetrain.checkpoint._format.tensor_file import Entry, Spec, read_header
from drivetrain.errors import CheckpointError

_KEPT = 8  # blocks of a file in an object store that are kept: small tensors share one


class CheckedFile:
    """A file of a checkpoint. Nothing comes out of it that its checksums do not vouch for.

    Args:
        folder: where it is.
        name: of the file.
        record: what the manifest says of it.
        block: bytes of a block.

    Raises:
        CheckpointError: it is missing, or of another size.
    """

    def __init__(self, folder: Folder, name: str, record: FileRecord, block: int) -> None:
        self.name = name
        self._path = folder.path
        self._record = record
        self._block = block
        self._source: Source = _opened(folder, name)
        if self._source.size != record.size:
            raise damaged(folder.path, f"{name} has {self._source.size} bytes instead of {record.size}")
        self._checked: set[int] = set()
        self._kept: OrderedDict[int, memoryview | bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._record.size

    def read(self, begin: int, end: int) -> memoryview | bytes | bytearray:
        """Return the bytes from ``begin`` to before ``end``.

        Raises:
            CheckpointError: a block of them is not what was written, or cannot be read.
        """
        if begin >= end:
            return b""
        first, last = begin // self._block, -(-end // self._block)
        if self._source.mapped:
            for number in range(first, last):
                if number not in self._checked:
                    self._check(number, self._source.read(*self._bounds(number)))
            return self._source.read(begin, end)
        whole = bytearray()
        for number in range(first, last):
            start, _ = self._bounds(number)
            whole += memoryview(self._fetched(number))[max(begin - start, 0) : end - start]
        return whole

    def check(self) -> list[int]:
        """Read everything; return the numbers of the blocks that are not what was written."""
        wrong = []
        for number in range(-(-self.size // self._block)):
            try:
                self._check(number, self._source.read(*self._bounds(number)))
            except Exception:
                wrong.append(number)
        return wrong

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * self._block, min((number + 1) * self._block, self.size)

    def _fetched(self, number: int) -> memoryview | bytes:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        try:
            content = self._source.read(*self._bounds(number))
        except Exception as error:  # of whatever library serves the store
            raise damaged(self._path, f"{self.name} cannot be read: {type(error).__name__}: {error}") from error
        self._check(number, content)
        with self._lock:
            self._kept[number] = content
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return content

    def _check(self, number: int, content: memoryview | bytes) -> None:
        expected = self._record.crc32[8 * number : 8 * number + 8]
        if f"{crc32(content):08x}" != expected:
            begin, end = self._bounds(number)
            raise damaged(self._path, f"{self.name} was altered between bytes {begin} and {end}")
        self._checked.add(number)


def _opened(folder: Folder, name: str) -> Source:
    try:
        return folder.open(name)
    except FileNotFoundError:
        raise damaged(folder.path, f"{name} is missing") from None
    except OSError as error:
        raise damaged(folder.path, f"{name} cannot be read: {error}") from error


def damaged(path: str, problem: str) -> CheckpointError:
    """Return the error for a checkpoint that is not as it was written."""
    return CheckpointError(
        f"The checkpoint {path!r} is damaged: {problem}.",
        "every block that is read is compared with its checksum.",
        "take another checkpoint; `python -m drivetrain.checkpoint verify` lists all that is wrong with this one.",
    )


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that lies in a file.

    Attributes:
        file: which.
        entry: where in it.
    """

    file: CheckedFile
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.entry.dtype

    @property
    def spec(self) -> Spec:
        return Spec(self.entry.name, self.entry.dtype, self.entry.shape)

    def read(self, region: Region | None = None) -> torch.Tensor:
        """Return the tensor, or the part of it that ``region`` names, checked.

        On the CPU; from a local disk its memory is the file's own, mapped, and may be written to without changing it.

        Raises:
            CheckpointError: what is there is not what was written.
        """
        if region is None:
            return self._run(0, self.entry.numel).view(self.shape)
        if isinstance(region, Span):
            return self._run(region.start, max(region.start, region.stop))
        if 0 in region.sizes:
            return torch.empty(region.sizes, dtype=self.dtype)
        # The rows that it touches lie together; what it leaves out of them is read and dropped.
        shape, row = as_rows(self.shape), row_size(self.shape)
        first, count = (*region.offsets, 0)[0], (*region.sizes, 1)[0]
        rows = self._run(first * row, (first + count) * row).view(count, *shape[1:])
        across = tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))
        return rows[(slice(None), *across[1:])].contiguous().view(region.sizes)

    def _run(self, start: int, stop: int) -> torch.Tensor:
        if not 0 <= start <= stop <= self.entry.numel:
            raise IndexError(f"elements {start} to {stop} of {self.entry.name!r}, which has {self.entry.numel}")
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        begin, item = self.entry.begin, self.dtype.itemsize
        content = self.file.read(begin + start * item, begin + stop * item)
        return torch.frombuffer(content, dtype=self.dtype)


def tensors_in(file: CheckedFile) -> dict[str, TensorSource]:
    """Return the tensors of a file by name; only its header is read."""
    entries = read_header(file.name, file.size, lambda begin, end: bytes(file.read(begin, end)))
    return {name: TensorSource(file, entry) for name, entry in entries.items()}
