"""Splits tensors into pieces of bounded size, and finds where a rank's region lies in a piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drivetrain._distributed.shards import Region, Span
from drivetrain._runtime.transfer import row_major
from drivetrain.checkpoint._format.tensor_file import Spec

# Maximum size of a piece that ranks do not exchange. Such a piece of a CPU tensor is written without a copy.
_LOCAL_PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows ``first`` to ``last - 1`` of a tensor."""

    spec: Spec
    first: int
    last: int

    @property
    def numel(self) -> int:
        return (self.last - self.first) * row_size(self.spec.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.spec.dtype.itemsize


def as_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` with at least one dimension. A scalar counts as one row."""
    return tuple(shape) or (1,)


def row_size(shape: Sequence[int]) -> int:
    """Return the number of elements in one row, which is one index of the first dimension."""
    size = 1
    for length in as_rows(shape)[1:]:
        size *= length
    return size


def pieces_of(spec: Spec, limit: int) -> Iterator[Piece]:
    """Split a tensor into pieces of at most ``limit`` bytes. A row that is larger is a separate piece."""
    rows = as_rows(spec.shape)[0]
    step = max(1, limit // max(1, row_size(spec.shape) * spec.dtype.itemsize))
    for first in range(0, rows, step):
        yield Piece(spec, first, min(first + step, rows))


def rounds_of(specs: Sequence[Spec], sharded: frozenset[str], limit: int) -> Iterator[list[Piece]]:
    """Group the pieces of a file, in order, into rounds. A round has at most ``limit`` bytes of sharded tensors."""
    current_round: list[Piece] = []
    size = 0
    for spec in specs:
        for piece in pieces_of(spec, limit if spec.name in sharded else max(limit, _LOCAL_PIECE_BYTES)):
            nbytes = piece.nbytes if spec.name in sharded else 0
            if size and size + nbytes > limit:
                yield current_round
                current_round, size = [], 0
            current_round.append(piece)
            size += nbytes
    if current_round:
        yield current_round


def batches_of(pieces: Iterable[Piece], can_join: Callable[[Piece], bool], limit: int) -> Iterator[list[Piece]]:
    """Group consecutive pieces for which ``can_join`` is true into batches of at most ``limit`` bytes."""
    batch: list[Piece] = []
    size, joined = 0, False
    for piece in pieces:
        nbytes, joining = piece.nbytes, can_join(piece)
        if batch and not (joined and joining and size + nbytes <= limit):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size, joined = size + nbytes, joining
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Overlap:
    """The intersection of a region and a piece.

    Attributes:
        source: index of the intersection in the rank's local tensor.
        target: index of the intersection in the piece.
        shape: shape of the intersection.
        flat: whether the indices refer to flattened (row-major) elements instead of rows.
    """

    source: tuple[slice, ...]
    target: tuple[slice, ...]
    shape: tuple[int, ...]
    flat: bool

    @property
    def numel(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


def overlap(region: Region, piece: Piece) -> Overlap | None:
    """Return the intersection of ``region`` and ``piece``; None if they do not intersect."""
    if isinstance(region, Span):
        row = row_size(piece.spec.shape)
        begin, end = piece.first * row, piece.last * row
        low, high = max(region.start, begin), min(region.stop, end)
        if low >= high:
            return None
        source, target = slice(low - region.start, high - region.start), slice(low - begin, high - begin)
        return Overlap((source,), (target,), (high - low,), True)
    offsets, sizes = region.offsets or (0,), region.sizes or (1,)
    low, high = max(offsets[0], piece.first), min(offsets[0] + sizes[0], piece.last)
    if low >= high or 0 in sizes:
        return None
    other_slices = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], sizes[1:], strict=True))
    return Overlap(
        (slice(low - offsets[0], high - offsets[0]),),
        (slice(low - piece.first, high - piece.first), *other_slices),
        (high - low, *sizes[1:]),
        False,
    )


def read_overlap(local: torch.Tensor, region: Region, part: Overlap) -> torch.Tensor:
    """Return the elements of ``part`` from the local tensor, flat and on the CPU."""
    values = local.detach()
    if part.flat:
        return row_major(values.reshape(-1)[part.source]).cpu()
    assert not isinstance(region, Span)
    return row_major(values.reshape(region.sizes or (1,))[part.source]).cpu()


def write_overlap(whole: torch.Tensor, piece: Piece, part: Overlap, values: torch.Tensor) -> None:
    """Copy flat ``values`` to their position in ``whole``, the flat tensor of the piece."""
    if part.flat:
        whole[part.target].copy_(values)
    else:
        rows = whole.view(piece.last - piece.first, *as_rows(piece.spec.shape)[1:])
        rows[part.target].copy_(values.view(part.shape))


def rows_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece of an unsharded tensor as a flat CPU tensor, which is a view if possible."""
    values = tensor.detach().resolve_conj().resolve_neg()
    if piece.numel < values.numel():
        values = values.reshape(as_rows(values.shape))[piece.first : piece.last]
    return row_major(values).cpu()


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat CPU tensor."""
    return memoryview(row_major(flat).view(torch.uint8).numpy())  # type: ignore[arg-type]


def count_elements(regions: Sequence[Region | None]) -> int:
    """Return the total number of elements in all ranks' regions of one tensor."""
    count = 0
    for region in regions:
        if isinstance(region, Span):
            count += region.stop - region.start
        elif region is not None:
            count += math.prod(region.sizes)
    return count
