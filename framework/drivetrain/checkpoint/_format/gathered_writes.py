"""Writes sharded tensors as full tensors. A file's owner gathers the tensors piece by piece from the other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate

import torch

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._distributed.shards import ParameterShard, Region
from drivetrain._storage.publication import Publication
from drivetrain.checkpoint._format.file_writer import MAX_WAITING_PIECES, FileWriter
from drivetrain.checkpoint._format.host_copy import TensorOrShard
from drivetrain.checkpoint._format.manifest import FileRecord
from drivetrain.checkpoint._format.pieces import (
    Piece,
    batches_of,
    bytes_of,
    overlap,
    read_overlap,
    rounds_of,
    rows_of,
    write_overlap,
)
from drivetrain.checkpoint._format.tensor_file import header_of
from drivetrain.checkpoint._format.write_plan import PlannedFile

Regions = Mapping[str, Region | None]
"""The regions of sharded tensors that one rank contributes, by name."""

_FlatPiece = tuple[torch.Tensor, bool]
"""The values of a piece as a flat tensor, and whether their memory belongs to an existing tensor."""

_ALIGNMENT = 16  # bytes
_MAX_JOINED = 2**16
"""Maximum size in bytes of a piece that is joined with other pieces.

Joining small pieces costs less than queueing each of them for the writer's threads.
"""


@dataclass(frozen=True, slots=True)
class GatheredWriter:
    """Writes the tensors of one part.

    Args:
        tensors: this rank's tensors and shards.
        regions: the regions that each rank contributes, by rank.
        control: the control plane.
        publication: where the files are written.
        piece: number of bytes that are exchanged at a time.
        digest: name of the digest to compute for each file; None for no digest.
    """

    tensors: Mapping[str, TensorOrShard]
    regions: Sequence[Regions]
    control: ControlPlane
    publication: Publication
    piece: int
    digest: str | None = None

    def write(self, files: Sequence[PlannedFile]) -> dict[str, FileRecord]:
        """Write the files that this rank owns, and send shards for the others. Collective.

        Raises:
            LocalWriteError: a file that this rank owns could not be written, or a shard of this rank could not be read.
                The error is raised after the exchange of all files, so that no other rank waits for this one. Any other
                error comes from the exchange, which cannot be continued.
        """
        records: dict[str, FileRecord] = {}
        problem: LocalWriteError | None = None
        for wave in _split_into_waves(files):
            try:
                records.update(self._write_wave(wave))
            except LocalWriteError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return records

    def _write_wave(self, wave: Sequence[PlannedFile]) -> dict[str, FileRecord]:
        """Write files of different owners concurrently. Each iteration writes one round of pieces of each file."""
        sharded = frozenset(self.regions[0])
        owned = next((file for file in wave if file.owner == self.control.rank), None)
        output = None if owned is None else _Output(owned, self.publication, self.digest)
        receive_buffers, assembly_buffers = _Buffers(1), _Buffers(MAX_WAITING_PIECES + 1)
        rounds = [(file.owner, rounds_of(file.specs, sharded, self.piece)) for file in wave]
        problems: list[Exception] = []
        try:
            while True:
                current_round = [
                    (owner, pieces) for owner, remaining in rounds if (pieces := next(remaining, None)) is not None
                ]
                if not current_round:
                    break
                received = self._exchange(current_round, receive_buffers, problems)
                for owner, pieces in current_round:
                    if owner == self.control.rank and output is not None:
                        output.write(self._assembled(pieces, received, assembly_buffers))
            records = {} if output is None else output.finish()
        finally:
            if output is not None:
                output.close()
        if problems:
            raise LocalWriteError(problems[0])
        return records

    def _exchange(
        self,
        current_round: Sequence[tuple[int, list[Piece]]],
        receive_buffers: _Buffers,
        problems: list[Exception],
    ) -> dict[int, torch.Tensor]:
        """Send this rank's parts of the pieces to the files' owners; return the bytes received, by sending rank.

        The owners wait for the bytes of every part. If a part cannot be read, zeros are sent in its place, and the
        error is added to ``problems``.
        """
        control, sends = self.control, {}
        receives: dict[int, torch.Tensor] = {}
        for owner, pieces in current_round:
            if owner != control.rank:
                if count := self._nbytes_from(control.rank, pieces):
                    try:
                        sends[owner] = self._bytes_to_send(pieces, count)
                    except Exception as error:
                        problems.append(error)
                        sends[owner] = torch.zeros(count, dtype=torch.uint8)
                continue
            others = [rank for rank in range(control.world_size) if rank != control.rank]
            nbytes = {rank: count for rank in others if (count := self._nbytes_from(rank, pieces))}
            receives = dict(zip(nbytes, receive_buffers.cut(list(nbytes.values())), strict=True))
        if control.world_size > 1:
            control.exchange(sends, receives)
        return receives

    def _bytes_to_send(self, pieces: Sequence[Piece], count: int) -> torch.Tensor:
        parts = [part.view(torch.uint8) for part in self._parts(pieces)]
        content = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        if content.numel() != count:
            raise ValueError(f"this rank's shards have {content.numel()} bytes instead of {count}")
        return content

    def _parts(self, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
        for piece in pieces:
            value = self.tensors.get(piece.spec.name)
            region = self.regions[self.control.rank].get(piece.spec.name)
            part = None if region is None else overlap(region, piece)
            if part is not None and region is not None and isinstance(value, ParameterShard):
                yield read_overlap(value.local, region, part)

    def _nbytes_from(self, rank: int, pieces: Sequence[Piece]) -> int:
        total = 0
        for piece in pieces:
            region = self.regions[rank].get(piece.spec.name)
            part = None if region is None else overlap(region, piece)
            total += 0 if part is None else part.numel * piece.spec.dtype.itemsize
        return total

    def _assembled(
        self, pieces: Sequence[Piece], received: Mapping[int, torch.Tensor], buffers: _Buffers
    ) -> Iterator[_FlatPiece]:
        """Yield each piece as one flat tensor. Consecutive small pieces of unsharded tensors are joined."""
        consumed = dict.fromkeys(received, 0)
        for batch in batches_of(pieces, self._is_small, self.piece):
            piece = batch[0]
            if len(batch) > 1:
                (memory,) = buffers.cut([sum(small.nbytes for small in batch)])
                yield torch.cat([self._rows(small).view(torch.uint8) for small in batch], out=memory), False
                continue
            value = self.tensors[piece.spec.name]
            if not isinstance(value, ParameterShard):
                rows = self._rows(piece)
                yield rows, rows.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
                continue
            (memory,) = buffers.cut([piece.nbytes])
            full_value = memory.view(piece.spec.dtype)
            for rank, regions in enumerate(self.regions):
                region = regions.get(piece.spec.name)
                part = None if region is None else overlap(region, piece)
                if part is None or region is None:
                    continue
                if rank == self.control.rank:
                    values = read_overlap(value.local, region, part)
                else:
                    begin = consumed[rank]
                    consumed[rank] += part.numel * piece.spec.dtype.itemsize
                    values = received[rank][begin : consumed[rank]].view(piece.spec.dtype)
                write_overlap(full_value, piece, part, values)
            yield full_value, False

    def _is_small(self, piece: Piece) -> bool:
        return piece.nbytes <= _MAX_JOINED and not isinstance(self.tensors[piece.spec.name], ParameterShard)

    def _rows(self, piece: Piece) -> torch.Tensor:
        value = self.tensors[piece.spec.name]
        assert not isinstance(value, ParameterShard)
        return rows_of(value, piece)


class _Buffers:
    """A ring of reused buffers. With repeated allocations, the allocator would hold several times as much memory.

    Args:
        count: number of buffers; `cut` reuses a buffer after ``count`` calls.
    """

    def __init__(self, count: int) -> None:
        self._buffers = deque([torch.empty(0, dtype=torch.uint8)] * count)

    def cut(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return one tensor per size in bytes, aligned for every dtype."""
        offsets = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        buffer = self._buffers.popleft()
        if buffer.numel() < offsets[-1]:
            del buffer  # free the buffer before a larger one is allocated
            buffer = torch.empty(offsets[-1], dtype=torch.uint8)
        self._buffers.append(buffer)
        return [buffer[begin : begin + size] for begin, size in zip(offsets, sizes, strict=False)]


class LocalWriteError(Exception):
    """Carries an error of this rank's files or shards past the exchange, which all ranks must finish."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class _Output:
    """A file that this rank owns. An error is kept until `finish`, because other ranks continue to send shards."""

    def __init__(self, file: PlannedFile, publication: Publication, digest: str | None) -> None:
        self._name = file.name
        self._problem: Exception | None = None
        self._stack = ExitStack()
        self._writer: FileWriter | None = None
        try:
            sink = self._stack.enter_context(publication.create(file.name))
            self._writer = FileWriter(sink, digest)
            self._writer.write(header_of(file.specs))
        except Exception as error:
            self._fail(error)

    def write(self, pieces: Iterator[_FlatPiece]) -> None:
        try:
            for piece, borrowed in pieces:
                if self._writer is None:
                    return
                self._writer.write(bytes_of(piece), borrowed)
        except Exception as error:
            self._fail(error)

    def finish(self) -> dict[str, FileRecord]:
        try:
            if self._writer is not None:
                self._writer.flush()
                self._stack.close()
                record = self._writer.record()
                self._writer.close()
                self._writer = None
                return {self._name: record}
        except Exception as error:
            self._fail(error)
        assert self._problem is not None
        raise LocalWriteError(self._problem)

    def close(self) -> None:
        """Stop the threads and close the file; a file that was not finished is discarded."""
        if self._writer is not None:
            self._fail(RuntimeError("the save was aborted"))

    def _fail(self, error: Exception) -> None:
        self._problem = self._problem or error
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        # Pass the error to the file's context, which would otherwise commit the file.
        with suppress(Exception):
            self._stack.__exit__(type(error), error, error.__traceback__)


def _split_into_waves(files: Sequence[PlannedFile]) -> Iterator[list[PlannedFile]]:
    """Yield waves of files with at most one file per owner."""
    files_by_owner: dict[int, list[PlannedFile]] = {}
    for file in files:
        files_by_owner.setdefault(file.owner, []).append(file)
    for number in range(max((len(owned) for owned in files_by_owner.values()), default=0)):
        yield [owned[number] for owned in files_by_owner.values() if number < len(owned)]
