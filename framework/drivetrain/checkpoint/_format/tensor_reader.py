"""Tensors in files, read by the part: only the blocks that are touched are read, and each is checked.

They are read into memory of their own. A map of the file would be one copy less, and a file that is cut short under a
map ends the process.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from drivetrain._distributed.shards import Region, Span
from drivetrain.checkpoint._format.checksums import DIGESTS, crc32
from drivetrain.checkpoint._format.folder import Folder, Source, StorageError
from drivetrain.checkpoint._format.local_file import ChangedFileError, NoFileError
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.pieces import as_rows, bytes_of, row_size
from drivetrain.checkpoint._format.read_memory import allocate_bytes, allocate_tensor
from drivetrain.checkpoint._format.tensor_file import Entry, Spec, read_header
from drivetrain.errors import CheckpointError

_CACHED_BLOCKS = (
    4  # blocks of a file that are kept, or as many as there are readers: tensors share the one in which they meet
)


class CheckResult(NamedTuple):
    """What reading a file has shown.

    Attributes:
        wrong: the numbers of the blocks that are not what was written.
        forged: whether its digest is another, though all checksums are right.
        unknown: whether its digest was not computed, for the zeros in it that the disk does not keep are too many.
    """

    bad_blocks: list[int]
    digest_differs: bool
    digest_skipped: bool


class ZeroBudget:
    """How many bytes that take no place on the disk may be worked through: they cost nobody anything to make."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = threading.Lock()

    def add_zeros(self, digest: Any, size: int) -> Any:
        """Return the digest with so many zeros at its end; None where they are too many."""
        with self._lock:
            self._left -= size
            if self._left < 0:
                return None
        digest.update(bytes(size))
        return digest


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
        """Return the bytes from ``begin`` to before ``end``.

        Raises:
            CheckpointError: a block of them is not what was written, or cannot be read.
        """
        content = bytearray(max(0, end - begin))
        self.fill(begin, memoryview(content))
        return content

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``begin`` on. A block that lies within is read into it as it is.

        Raises:
            CheckpointError: a block of them is not what was written, or cannot be read.
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

    def check(self, zeros: ZeroBudget) -> CheckResult:
        """Read everything, and compare it with the checksums and with the digest, where there is one.

        Args:
            zeros: that the digest may be computed of, though the disk does not even keep them.
        """
        bad_blocks = []
        digest = DIGESTS["sha256"]() if self._record.sha256 else None
        digest_skipped = False
        memory = memoryview(bytearray(min(self._block, self.size)))
        for number in range(-(-self.size // self._block)):
            begin, end = self._bounds(number)
            try:
                if self._source.is_hole(begin, end):  # the disk does not even keep it
                    self._compare(number, _sum_of_zeros(end - begin))
                    if digest is not None:
                        digest = zeros.add_zeros(digest, end - begin)
                        digest_skipped = digest is None
                else:
                    self._read(number, memory[: end - begin])
                    if digest is not None:
                        digest.update(memory[: end - begin])
            except Exception:
                bad_blocks.append(number)
                digest = None
        return CheckResult(bad_blocks, digest is not None and digest.hexdigest() != self._record.sha256, digest_skipped)

    def _bounds(self, number: int) -> tuple[int, int]:
        return number * self._block, min((number + 1) * self._block, self.size)

    def _read_shared(self, number: int, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with a part of a block, which is kept for a while: the next tensor has the rest."""
        with self._lock:
            if self._copy_cached(number, begin, memory):
                return
            full = len(self._cached) >= self._max_cached
            content = self._cached.popitem(last=False)[1] if full else allocate_bytes(min(self._block, self.size))
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
        except (FileNotFoundError, ChangedFileError) as error:
            raise damage_error(self._path, f"{self.name} cannot be read: {type(error).__name__}: {error}") from error
        except Exception as error:  # of whatever library serves the store
            raise _storage_error(self._path, f"{self.name} cannot be read: {type(error).__name__}: {error}") from error
        self._compare(number, crc32(memory))

    def _compare(self, number: int, found: int) -> None:
        expected = self._record.crc32[8 * number : 8 * number + 8]
        if f"{found:08x}" != expected:
            begin, end = self._bounds(number)
            raise damage_error(self._path, f"{self.name} was altered between bytes {begin} and {end}")


@functools.cache
def _sum_of_zeros(size: int) -> int:
    return crc32(bytes(size))


def _open_source(folder: Folder, name: str) -> Source:
    try:
        return folder.open(name)
    except FileNotFoundError:
        raise damage_error(folder.path, f"{name} is missing") from None
    except NoFileError as error:
        raise damage_error(folder.path, f"{error}, and no file") from None
    except OSError as error:
        raise _storage_error(folder.path, f"{name} cannot be read: {error}") from error


def _storage_error(path: str, problem: str) -> StorageError:
    return StorageError(
        f"The checkpoint {path!r} cannot be read: {problem}.",
        "the storage refused, or does not answer: what it has may be whole.",
        "check the path, its permissions and the network, and try again.",
    )


def damage_error(path: str, problem: str) -> CheckpointError:
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

    def nbytes(self, region: Region | None = None) -> int:
        """Return the bytes of the tensor, or of the part of it that ``region`` names."""
        if region is None:
            return self.entry.nbytes
        numel = region.stop - region.start if isinstance(region, Span) else math.prod(region.sizes)
        return max(0, numel) * self.dtype.itemsize

    def read(self, region: Region | None = None) -> torch.Tensor:
        """Return the tensor, or the part of it that ``region`` names, checked: on the CPU, in memory of its own.

        Raises:
            CheckpointError: what is there is not what was written, or there is no memory for it.
        """
        if region is None:
            return self._read_elements(0, self.entry.numel).view(self.shape)
        if isinstance(region, Span):
            return self._read_elements(region.start, max(region.start, region.stop))
        if 0 in region.sizes:
            return torch.empty(region.sizes, dtype=self.dtype)
        # The rows that it touches lie together; what it leaves out of them is read and dropped.
        shape, row = as_rows(self.shape), row_size(self.shape)
        first, count = (*region.offsets, 0)[0], (*region.sizes, 1)[0]
        rows = self._read_elements(first * row, (first + count) * row).view(count, *shape[1:])
        across = tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))
        return rows[(slice(None), *across[1:])].contiguous().view(region.sizes)

    def _read_elements(self, start: int, stop: int) -> torch.Tensor:
        if not 0 <= start <= stop <= self.entry.numel:
            raise IndexError(f"elements {start} to {stop} of {self.entry.name!r}, which has {self.entry.numel}")
        values = allocate_tensor(stop - start, self.dtype, f"{self.entry.name!r} in {self.file.name}")
        if start < stop:
            self.file.fill(self.entry.begin + start * self.dtype.itemsize, bytes_of(values))
        return values


def tensors_in(file: CheckedFile) -> dict[str, TensorSource]:
    """Return the tensors of a file by name; only its header is read."""
    entries = read_header(file.name, file.size, file.read)
    return {name: TensorSource(file, entry) for name, entry in entries.items()}
