"""Writes tensors to files, on all ranks together. A file's owner pastes what the ranks hold of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest

import torch

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._distributed.shards import Box, ParameterShard, Region, Span
from drivetrain._format.file_writer import FileWriter, file_writer
from drivetrain._format.manifest import FileRecord
from drivetrain._format.tensor_file import Spec, bytes_of, header_of, in_file_order
from drivetrain._runtime.transfer import row_major
from drivetrain._storage.folder import Folder

TensorOrShard = torch.Tensor | ParameterShard

Regions = Mapping[str, Region | None]
"""The regions of sharded tensors that one rank contributes, by name."""

SMALL_BYTES = 64 * 2**20
"""A part is not split into files that are smaller than this."""

LARGE_BYTES = 8 * 2**30
"""A part that is larger than this is split into several files even on one rank."""

CHUNK_BYTES = 4 * 2**20
"""How many bytes of a file its owner collects at a time, unless a single row of a tensor is larger.

Each rank's memory for a save is a few chunks, however large a tensor is.
"""

_MAX_JOINED = 2**16
"""Maximum size in bytes of values that are joined with others.

Joining small values costs less than queueing each of them for the writer's threads.
"""

_ALIGNMENT = 16  # bytes


@dataclass(slots=True)
class TensorFile:
    """A file of tensors that the ranks write together.

    Attributes:
        stem: beginning of its name.
        owner: the rank that writes it.
        specs: the tensors in the file, in file order.
        tensors: this rank's tensors and shards.
        name: its name, once the ranks have agreed on where it is written.
        regions: the regions that each rank contributes, by rank, once the ranks have agreed on them.
    """

    stem: str
    owner: int
    specs: Sequence[Spec]
    tensors: Mapping[str, TensorOrShard]
    name: str = ""
    regions: Sequence[Regions] = ()

    def batches(self) -> Iterator[tuple[TensorFile, list[Chunk]]]:
        """Yield this file with its chunks in order, in batches of at most `CHUNK_BYTES`."""
        batch: list[Chunk] = []
        size = 0
        for chunk in _chunks_of(self.specs):
            if batch and size + chunk.nbytes > CHUNK_BYTES:
                yield self, batch
                batch, size = [], 0
            batch.append(chunk)
            size += chunk.nbytes
        if batch:
            yield self, batch

    def nbytes_of(self, rank: int, chunks: Sequence[Chunk]) -> int:
        """Return how many bytes a rank contributes to chunks."""
        overlaps = [(chunk, _overlap(self.regions[rank], chunk)) for chunk in chunks]
        return sum(overlap[1].numel * chunk.spec.dtype.itemsize for chunk, overlap in overlaps if overlap is not None)

    def bytes_of_overlaps(self, rank: int, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return what this rank contributes to chunks, one after the other, on the CPU."""
        overlaps = [(chunk, _overlap(self.regions[rank], chunk)) for chunk in chunks]
        parts = [self._own(chunk, *overlap).view(torch.uint8) for chunk, overlap in overlaps if overlap is not None]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    def write(
        self, writer: FileWriter, rank: int, chunks: Sequence[Chunk], received: Mapping[int, torch.Tensor]
    ) -> None:
        """Write chunks. Values that are in memory already are not copied, unless they are small.

        Args:
            writer: writes the file.
            rank: this rank, which owns the file.
            chunks: the chunks.
            received: what the other ranks have sent, by rank: the results of their `bytes_of_overlaps`.
        """
        remaining = dict(received)
        for chunks_together in _joined(chunks):
            first = chunks_together[0]
            value = self.tensors[first.spec.name]
            if first.nbytes > _MAX_JOINED and isinstance(value, torch.Tensor):
                values = _rows(value, first)
                if values.device.type == "cpu" and values.is_contiguous():
                    writer.write(bytes_of(values))
                    continue
            with writer.memory(sum(chunk.nbytes for chunk in chunks_together)) as memory:
                begin = 0
                for chunk in chunks_together:
                    bytes_of_chunk = memory[begin : begin + chunk.nbytes]
                    self._fill(bytes_of_chunk.view(chunk.spec.dtype).view(chunk.shape), rank, chunk, remaining)
                    begin += chunk.nbytes

    def _fill(self, whole: torch.Tensor, rank: int, chunk: Chunk, remaining: dict[int, torch.Tensor]) -> None:
        """Copy a chunk to ``whole``, and take what other ranks contribute from the bytes that are ``remaining``."""
        value = self.tensors[chunk.spec.name]
        if isinstance(value, torch.Tensor):
            whole.copy_(_rows(value, chunk))
            return
        for source, regions in enumerate(self.regions):
            overlap = _overlap(regions, chunk)
            if overlap is None:
                continue
            region = overlap[1]
            if source == rank:
                values = self._own(chunk, *overlap)
            else:
                count = region.numel * chunk.spec.dtype.itemsize
                values = remaining[source][:count].view(chunk.spec.dtype)
                remaining[source] = remaining[source][count:]
            if isinstance(region, Span):
                whole.view(-1)[region.start : region.stop].copy_(values)
            else:
                whole[region.index].copy_(values.view(region.sizes))

    def _own(self, chunk: Chunk, rows: slice, region: Region) -> torch.Tensor:
        """Return the elements of this rank's shard that lie in a chunk, flat and on the CPU."""
        value = self.tensors[chunk.spec.name]
        assert isinstance(value, ParameterShard)
        trailing = () if isinstance(region, Span) else region.sizes[1:]
        return row_major(value.local.detach().reshape(-1, *trailing)[rows]).cpu()


def plan_files(
    stem: str, specs: Sequence[Spec], tensors: Mapping[str, TensorOrShard], world_size: int
) -> list[TensorFile]:
    """Assign tensors to files in order, balanced by bytes, and files to ranks.

    Every rank computes the same plan without communication.

    Args:
        stem: beginning of the file names.
        specs: the tensors, in the same order on every rank.
        tensors: this rank's tensors and shards.
        world_size: number of ranks that may write.
    """
    if not specs:
        return []
    total = sum(spec.nbytes for spec in specs)
    count = max(1, min(world_size, total // SMALL_BYTES), -(-total // LARGE_BYTES))
    contents: list[list[Spec]] = [[] for _ in range(count)]
    begin = 0
    for spec in specs:
        # A tensor is assigned by its midpoint. A file exceeds its share by at most half of its first and last tensors.
        middle = begin + spec.nbytes // 2
        contents[min(count * middle // max(total, 1), count - 1)].append(spec)
        begin += spec.nbytes
    contents = [in_file_order(specs_of_file) for specs_of_file in contents if specs_of_file]
    count = len(contents)
    stems = [f"{stem}-{number + 1:05d}-of-{count:05d}" for number in range(count)] if count > 1 else [stem]
    return [
        TensorFile(stem_of_file, number * world_size // count, specs_of_file, tensors)
        for number, (stem_of_file, specs_of_file) in enumerate(zip(stems, contents, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows ``first`` to ``last - 1`` of a tensor, which have ``nbytes`` bytes and ``shape``; all of a small one."""

    spec: Spec
    first: int
    last: int
    shape: tuple[int, ...]
    nbytes: int


def _chunks_of(specs: Sequence[Spec]) -> Iterator[Chunk]:
    for spec in specs:
        count, *trailing = spec.shape or (1,)  # a scalar is one row
        row_bytes = spec.nbytes // max(1, count)
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for first in range(0, count, step):
            last = min(first + step, count)
            yield Chunk(spec, first, last, (last - first, *trailing), (last - first) * row_bytes)


def _joined(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Yield small chunks that follow each other together, and each other chunk on its own."""
    small: list[Chunk] = []
    for chunk in chunks:
        if chunk.nbytes <= _MAX_JOINED:
            small.append(chunk)
            continue
        if small:
            yield small
        yield [chunk]
        small = []
    if small:
        yield small


def _overlap(regions: Regions, chunk: Chunk) -> tuple[slice, Region] | None:
    """Return which rows (of a span, elements) of a rank's shard lie in a chunk, and their region in the chunk."""
    region = regions.get(chunk.spec.name)
    if region is None:
        return None
    if isinstance(region, Span):
        start, stop, row = region.start, region.stop, chunk.spec.row_size
    else:
        start, row = (*region.offsets, 0)[0], 1
        stop = start + (*region.sizes, 1)[0]
    first, last = chunk.first * row, chunk.last * row
    low, high = max(start, first), min(stop, last)
    if low >= high:
        return None
    within = slice(low - start, high - start)
    if isinstance(region, Span):
        return within, Span(low - first, high - first)
    return within, Box((low - first, *region.offsets[1:]), (high - low, *region.sizes[1:]))


def _rows(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return a chunk of an unsharded tensor."""
    values = tensor.detach()
    if chunk.shape[0] != (chunk.spec.shape or (1,))[0]:
        values = values[chunk.first : chunk.last]
    return values.resolve_conj().resolve_neg()


class TensorWriter:
    """Writes files of tensors; each rank writes its own at the same time as the others.

    Args:
        control: the control plane.
        folder: where the files are written.
        hash_algorithm: name of the hash to compute of each file; None for none.
    """

    def __init__(self, control: ControlPlane, folder: Folder, hash_algorithm: str | None) -> None:
        self._control = control
        self._folder = folder
        self._hash_algorithm = hash_algorithm
        self._exchange_error: Exception | None = None
        self._received = torch.empty(0, dtype=torch.uint8)
        self.records: dict[str, FileRecord] = {}
        """The records of the files that this rank has written."""
        self.problem: Exception | None = None
        """The first error of this rank's files and shards, which does not keep it from serving the other ranks."""

    def write(self, files: Sequence[TensorFile]) -> None:
        """Write the files that this rank owns, and send its shards for the others. Collective.

        All ranks pass the files with sharded tensors in the same order, and each rank after them files of its own.

        Raises:
            Exception: the exchange failed, so that the ranks are no longer at the same point.
        """
        exchanges = self._exchanges(files)
        for file in files:
            if file.owner == self._control.rank:
                self._write_file(file, exchanges)
        for _ in exchanges:
            pass  # other ranks write more than this one

    def _write_file(self, file: TensorFile, exchanges: Iterator[Mapping[int, torch.Tensor]]) -> None:
        batches = file.batches()
        try:
            with file_writer(self._folder.create(file.name), self._hash_algorithm) as writer:
                writer.write(header_of(file.specs))
                for _, chunks in batches:
                    file.write(writer, self._control.rank, chunks, next(exchanges))
            self.records[file.name] = writer.record
        except Exception as error:
            if error is self._exchange_error:
                raise
            self.problem = self.problem or error
            for _ in batches:
                next(exchanges)  # the other ranks send their shards all the same

    def _exchanges(self, files: Sequence[TensorFile]) -> Iterator[Mapping[int, torch.Tensor]]:
        """Exchange what the next batch of each owner needs, again and again; yield what this rank received, by rank."""
        files_by_owner: dict[int, list[TensorFile]] = {}
        for file in files:
            files_by_owner.setdefault(file.owner, []).append(file)
        batches = [chain.from_iterable(file.batches() for file in owned) for owned in files_by_owner.values()]
        for step in zip_longest(*batches):
            yield self._exchange([batch for batch in step if batch is not None])

    def _exchange(self, batches: Sequence[tuple[TensorFile, Sequence[Chunk]]]) -> Mapping[int, torch.Tensor]:
        """Send this rank's overlaps of batches to the files' owners; return what this rank received, by rank.

        The owners wait for every byte. If a shard cannot be read, zeros are sent in its place.
        """
        own_rank, sends, receives = self._control.rank, {}, {}
        for file, chunks in batches:
            if file.owner == own_rank:
                ranks = [rank for rank in range(self._control.world_size) if rank != own_rank]
                counts = {rank: count for rank in ranks if (count := file.nbytes_of(rank, chunks))}
                receives = self._memory_for(counts)
            elif count := file.nbytes_of(own_rank, chunks):
                try:
                    sends[file.owner] = overlaps = file.bytes_of_overlaps(own_rank, chunks)
                    if overlaps.numel() != count:
                        raise ValueError(f"this rank's shards have {overlaps.numel()} bytes instead of {count}")
                except Exception as error:
                    self.problem = self.problem or error
                    sends[file.owner] = torch.zeros(count, dtype=torch.uint8)
        if sends or receives:
            try:
                self._control.exchange(sends, receives)
            except Exception as error:
                self._exchange_error = error
                raise
        return receives

    def _memory_for(self, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Return memory for what is received, aligned for every dtype. It is the same memory in each exchange."""
        begins = list(accumulate((-(-count // _ALIGNMENT) * _ALIGNMENT for count in counts.values()), initial=0))
        if self._received.numel() < begins[-1]:
            self._received = torch.empty(begins[-1], dtype=torch.uint8)
        parts = zip(counts.items(), begins, strict=False)
        return {rank: self._received[begin : begin + count] for (rank, count), begin in parts}
