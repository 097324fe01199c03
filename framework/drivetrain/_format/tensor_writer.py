"""Writes tensors to files, on all ranks together. A file's owner pastes what the ranks hold of each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._distributed.shards import Box, ParameterShard, Region, Span
from drivetrain._format.file_writer import FileWriter, file_writer
from drivetrain._format.host_copy import TensorOrShard
from drivetrain._format.manifest import FileRecord
from drivetrain._format.tensor_file import Spec, bytes_of, header_of, row_ranges
from drivetrain._runtime.transfer import row_major
from drivetrain._storage.publication import Publication

Regions = Mapping[str, Region | None]
"""The regions of sharded tensors that one rank contributes, by name."""

CHUNK_BYTES = 4 * 2**20
"""How many bytes of a file its owner collects at a time, unless a single row of a tensor is larger.

Each rank's memory for a save is a few chunks, however large a tensor is.
"""

_MAX_JOINED = 2**16
"""Maximum size in bytes of values that are joined with others.

Joining small values costs less than queueing each of them for the writer's threads.
"""


_ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows ``first`` to ``last - 1`` of a tensor; all of a small one."""

    spec: Spec
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.last - self.first, *self.spec.shape[1:]

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.spec.row_size * self.spec.dtype.itemsize


def _batches_of(specs: Sequence[Spec]) -> Iterator[list[Chunk]]:
    """Yield the chunks of a file in order, in batches of at most `CHUNK_BYTES`."""
    batch: list[Chunk] = []
    size = 0
    for spec in specs:
        for first, last in row_ranges(spec, CHUNK_BYTES):
            chunk = Chunk(spec, first, last)
            if batch and size + chunk.nbytes > CHUNK_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(chunk)
            size += chunk.nbytes
    if batch:
        yield batch


def _batches_of_files(files: Sequence[TensorFile]) -> Iterator[tuple[TensorFile, list[Chunk]]]:
    for file in files:
        for batch in _batches_of(file.specs):
            yield file, batch


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file that will be written.

    Attributes:
        name: name of the file.
        owner: the rank that writes it.
        specs: the tensors in the file, in file order.
        tensors: this rank's tensors and shards.
        regions: the regions that each rank contributes, by rank.
    """

    name: str
    owner: int
    specs: Sequence[Spec]
    tensors: Mapping[str, TensorOrShard]
    regions: Sequence[Regions]

    def nbytes_of(self, rank: int, chunks: Sequence[Chunk]) -> int:
        """Return how many bytes a rank contributes to chunks."""
        shares = [(chunk, _share(self.regions[rank], chunk)) for chunk in chunks]
        return sum(share[1].numel * chunk.spec.dtype.itemsize for chunk, share in shares if share is not None)

    def bytes_of_shares(self, rank: int, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return what this rank contributes to chunks, one after the other, on the CPU."""
        shares = [(chunk, _share(self.regions[rank], chunk)) for chunk in chunks]
        parts = [self._own(chunk, *share).view(torch.uint8) for chunk, share in shares if share is not None]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    def write(
        self, writer: FileWriter, rank: int, chunks: Sequence[Chunk], received: Mapping[int, torch.Tensor]
    ) -> None:
        """Write chunks. Values that are in memory already are not copied.

        Args:
            writer: writes the file.
            rank: this rank, which owns the file.
            chunks: the chunks.
            received: what the other ranks have sent, by rank: the results of their `bytes_of_shares`.
        """
        small: list[torch.Tensor] = []
        remaining = dict(received)
        for chunk in chunks:
            value, dtype = self.tensors[chunk.spec.name], chunk.spec.dtype
            if isinstance(value, ParameterShard):
                shares = list(self._shares(rank, chunk, remaining))
                if chunk.nbytes <= _MAX_JOINED:
                    small.append(_pasted(shares, torch.empty(chunk.shape, dtype=dtype)))
                    continue
                _write_joined(writer, small)
                with writer.memory(chunk.nbytes) as memory:
                    _pasted(shares, memory.view(dtype).view(chunk.shape))
                continue
            values = _rows(value, chunk)
            if chunk.nbytes <= _MAX_JOINED:
                small.append(row_major(values).cpu().view(torch.uint8))
                continue
            _write_joined(writer, small)
            if values.device.type == "cpu" and values.is_contiguous():
                writer.write(bytes_of(values))
            else:
                with writer.memory(chunk.nbytes) as memory:
                    memory.view(dtype).view(chunk.shape).copy_(values)
        _write_joined(writer, small)

    def _shares(
        self, rank: int, chunk: Chunk, remaining: dict[int, torch.Tensor]
    ) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yield what each rank contributes to a chunk, and take it from the bytes that are ``remaining``."""
        for source, regions in enumerate(self.regions):
            share = _share(regions, chunk)
            if share is None:
                continue
            region = share[1]
            if source == rank:
                yield region, self._own(chunk, *share)
            else:
                count = region.numel * chunk.spec.dtype.itemsize
                values, remaining[source] = remaining[source][:count], remaining[source][count:]
                yield region, values.view(chunk.spec.dtype)

    def _own(self, chunk: Chunk, rows: slice, region: Region) -> torch.Tensor:
        """Return the elements of this rank's shard that lie in a chunk, flat and on the CPU."""
        value = self.tensors[chunk.spec.name]
        assert isinstance(value, ParameterShard)
        trailing = () if isinstance(region, Span) else region.sizes[1:]
        return row_major(value.local.detach().reshape(-1, *trailing)[rows]).cpu()


def _share(regions: Regions, chunk: Chunk) -> tuple[slice, Region] | None:
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


def _pasted(shares: Iterable[tuple[Region, torch.Tensor]], whole: torch.Tensor) -> torch.Tensor:
    """Copy shares to their regions of ``whole``, and return its bytes."""
    for region, values in shares:
        if isinstance(region, Span):
            whole.view(-1)[region.start : region.stop].copy_(values)
        else:
            whole[region.index].copy_(values.view(region.sizes))
    return whole.view(-1).view(torch.uint8)


def _write_joined(writer: FileWriter, small: list[torch.Tensor]) -> None:
    """Write small values together, and forget them."""
    if small:
        with writer.memory(sum(part.numel() for part in small)) as memory:
            torch.cat(small, out=memory)
        small.clear()


def _rows(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return a chunk of an unsharded tensor."""
    values = tensor.detach()
    if (chunk.first, chunk.last) != (0, chunk.spec.rows[0]):
        values = values[chunk.first : chunk.last]
    return values.resolve_conj().resolve_neg()


class TensorWriter:
    """Writes files of tensors; each rank writes its own at the same time as the others.

    Args:
        control: the control plane.
        publication: where the files are written.
        hash_algorithm: name of the hash to compute of each file; None for none.
    """

    def __init__(self, control: ControlPlane, publication: Publication, hash_algorithm: str | None) -> None:
        self._control = control
        self._publication = publication
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
        batches = _batches_of(file.specs)
        try:
            with file_writer(self._publication.create(file.name), self._hash_algorithm) as writer:
                writer.write(header_of(file.specs))
                for chunks in batches:
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
        for step in zip_longest(*map(_batches_of_files, files_by_owner.values())):
            yield self._exchange([batch for batch in step if batch is not None])

    def _exchange(self, batches: Sequence[tuple[TensorFile, Sequence[Chunk]]]) -> Mapping[int, torch.Tensor]:
        """Send this rank's shares of batches to the files' owners; return what this rank received, by rank.

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
                    sends[file.owner] = shares = file.bytes_of_shares(own_rank, chunks)
                    if shares.numel() != count:
                        raise ValueError(f"this rank's shards have {shares.numel()} bytes instead of {count}")
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
