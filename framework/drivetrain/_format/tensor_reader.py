"""Reads tensors, or regions of tensors, from files. Only the required blocks are read, and each block is verified.

Bytes are read into allocated memory. Mapping the file would save a copy, but truncating a mapped file would kill the
process (SIGBUS).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from drivetrain._distributed.shards import Region, Span
from drivetrain._format.checkpoint_folder import storage_error
from drivetrain._format.checksums import crc32
from drivetrain._format.manifest import FileRecord
from drivetrain._format.tensor_file import Entry, bytes_of, read_header
from drivetrain._storage.folder import Folder, NoFileError, Source
from drivetrain.errors import CheckpointError

# Minimum number of blocks that are cached per file, because adjacent tensors share a block. With more parallel readers,
# one block per reader is cached.
_CACHED_BLOCKS = 4


class CheckedFile:
    """A file of a checkpoint. Only bytes whose checksum matches are returned.

    Args:
        folder: the folder that contains the file.
        name: name of the file.
        record: the record of the file in the manifest.
        block: block size in bytes.

    Raises:
        CheckpointError: the file is missing, or its size differs from the record.
    """

    def __init__(self, folder: Folder, name: str, record: FileRecord, block: int) -> None:
        self.name = name
        self._path = folder.path
        self._record = record
        self._block = block
        self._source: Source = _open_source(folder, name)
        if self._source.size != record.size:
            raise damage_error(folder.path, f"{name} has {self._source.size} bytes instead of {record.size}")
        self._max_cached = max(_CACHED_BLOCKS, folder.readers)
        self._cached: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._record.size

    def read(self, begin: int, end: int) -> bytearray:
        """Return the bytes from ``begin`` up to ``end``.

        Raises:
            CheckpointError: a block is damaged, or cannot be read.
        """
        content = bytearray(max(0, end - begin))
        self.fill(begin, memoryview(content))
        return content

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes starting at ``begin``. Blocks inside the range are read without a copy.

        Raises:
            CheckpointError: a block is damaged, or cannot be read.
        """
        end = begin + len(memory)
        for number in range(begin // self._block, -(-end // self._block)):
            start, stop = self._bounds(number)
            low, high = max(begin, start), min(end, stop)
            part = memory[low - begin : high - begin]
            if (low, high) == (start, stop):
                self._read(number, part)
            else:
                self._read_shared(number, low - start, part)

    def problem(self) -> str | None:
        """Read the whole file, and return how it differs from its record; None if it does not."""
        damaged = []
        fingerprint = hashlib.sha256()
        memory = memoryview(bytearray(min(self._block, self.size)))
        for number in range(-(-self.size // self._block)):
            begin, end = self._bounds(number)
            try:
                self._read(number, memory[: end - begin])
            except CheckpointError:
                damaged.append(begin)
            if self._record.sha256:
                fingerprint.update(memory[: end - begin])
        if damaged:
            return f"{self.name} was altered: {len(damaged)} block(s), the first at byte {damaged[0]}"
        if self._record.sha256 not in ("", fingerprint.hexdigest()):
            return f"{self.name} was altered: its checksums match, but its SHA-256 differs"
        return None

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * self._block, min((number + 1) * self._block, self.size)

    def _read_shared(self, number: int, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with part of a block, and cache the block, because the next tensor often needs the rest."""
        with self._lock:
            if self._copy_cached(number, begin, memory):
                return
            cache_is_full = len(self._cached) >= self._max_cached
            content = (
                self._cached.popitem(last=False)[1] if cache_is_full else _allocate_bytes(min(self._block, self.size))
            )
        self._read(number, content[: min(self._block, self.size - number * self._block)])
        with self._lock:
            self._cached[number] = content
            self._copy_cached(number, begin, memory)

    def _copy_cached(self, number: int, begin: int, memory: memoryview) -> bool:
        if number not in self._cached:
            return False
        self._cached.move_to_end(number)
        memory[:] = self._cached[number][begin : begin + len(memory)]
        return True

    def _read(self, number: int, memory: memoryview) -> None:
        try:
            self._source.fill(number * self._block, memory)
        except (FileNotFoundError, NoFileError, EOFError) as error:
            raise damage_error(self._path, f"{self.name} cannot be read: {type(error).__name__}: {error}") from error
        except Exception as error:  # the error's class depends on the storage's library
            raise storage_error(self._path, f"{self.name} cannot be read: {type(error).__name__}: {error}") from error
        expected = self._record.crc32[8 * number : 8 * number + 8]
        if f"{crc32(memory):08x}" != expected:
            begin, end = self._bounds(number)
            raise damage_error(self._path, f"{self.name} was altered between bytes {begin} and {end}")


def _open_source(folder: Folder, name: str) -> Source:
    try:
        return folder.open(name)
    except FileNotFoundError:
        raise damage_error(folder.path, f"{name} is missing") from None
    except NoFileError as error:
        raise damage_error(folder.path, f"{error}, not a file") from None
    except OSError as error:
        raise storage_error(folder.path, f"{name} cannot be read: {error}") from error


def damage_error(path: str, problem: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(
        f"The checkpoint {path!r} is damaged: {problem}.",
        "each block that is read is verified with its checksum.",
        "use another checkpoint; `python -m drivetrain.checkpoint verify` lists all damaged files of this one.",
    )


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A stored tensor that has not been read.

    Attributes:
        file: the file that holds the tensor.
        entry: the tensor's dtype, shape and offsets in the file.
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
    def numel(self) -> int:
        return self.entry.numel

    def read(self, region: Region | None = None) -> torch.Tensor:
        """Read and verify the tensor, or a region of it, into new CPU memory, and return the result.

        Raises:
            CheckpointError: the stored bytes are damaged.
        """
        if region is None:
            return self._read_elements(0, self.entry.numel).view(self.shape)
        if isinstance(region, Span):
            return self._read_elements(region.start, max(region.start, region.stop))
        if 0 in region.sizes:
            return torch.empty(region.sizes, dtype=self.entry.dtype)
        # Read the contiguous rows that the region touches, then slice the other dimensions.
        shape, row = self.entry.rows, self.entry.row_size
        first, count = (*region.offsets, 0)[0], (*region.sizes, 1)[0]
        rows = self._read_elements(first * row, (first + count) * row).view(count, *shape[1:])
        slices = tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))
        return rows[(slice(None), *slices[1:])].contiguous().view(region.sizes)

    def _read_elements(self, start: int, stop: int) -> torch.Tensor:
        if not 0 <= start <= stop <= self.entry.numel:
            raise IndexError(f"elements {start} to {stop} of {self.entry.name!r}, which has {self.entry.numel}")
        dtype = self.entry.dtype
        values = torch.empty(stop - start, dtype=dtype, device="cpu")
        if start < stop:
            self.file.fill(self.entry.begin + start * dtype.itemsize, bytes_of(values))
        return values


@dataclass(frozen=True, slots=True)
class CastSource(TensorSource):
    """A stored tensor that is converted to ``target``, another dtype, when it is read."""

    target: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.target

    def read(self, region: Region | None = None) -> torch.Tensor:
        return TensorSource.read(self, region).to(self.target)  # `super` does not work in a class with slots


def tensors_in(file: CheckedFile) -> dict[str, TensorSource]:
    """Return the tensors of a file by name; only the header of the file is read."""
    entries = read_header(file.name, file.size, file.read)
    return {name: TensorSource(file, entry) for name, entry in entries.items()}


def _allocate_bytes(count: int) -> memoryview:
    """Return ``count`` bytes of uninitialized memory. A bytearray would be filled with zeros first."""
    return memoryview(torch.empty(count, dtype=torch.uint8, device="cpu").numpy())  # type: ignore[arg-type]
