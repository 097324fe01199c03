"""Splits tensors into pieces of bounded size, and finds where a rank's region lies in a piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from drivetrain._distributed.shards import Region, Span
from drivetrain._runtime.transfer import row_major
from drivetrain.checkpoint._format.tensor_file import Spec

_LOCAL_PIECE_BYTES = 16 * 2**20  # for pieces that are not exchanged; CPU tensors are written without a copy


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
    """Return ``shape`` with at least one dimension; a scalar is one row."""
    return tuple(shape) or (1,)


def row_size(shape: Sequence[int]) -> int:
    """Return the number of elements per index of the first dimension."""
    size = 1
    for length in as_rows(shape)[1:]:
        size *= length
    return size


def pieces_of(spec: Spec, limit: int) -> Iterator[Piece]:
    """Split a tensor into pieces of at most ``limit`` bytes, but at least one row."""
    rows = as_rows(spec.shape)[0]
    step = max(1, limit // max(1, row_size(spec.shape) * spec.dtype.itemsize))
    for first in range(0, rows, step):
        yield Piece(spec, first, min(first + step, rows))


def rounds_of(specs: Sequence[Spec], sharded: frozenset[str], limit: int) -> Iterator[list[Piece]]:
    """Group the pieces of a file, in order, into rounds with at most ``limit`` bytes of sharded tensors each."""
    current: list[Piece] = []
    size = 0
    for spec in specs:
        for piece in pieces_of(spec, limit if spec.name in sharded else max(limit, _LOCAL_PIECE_BYTES)):
            nbytes = piece.nbytes if spec.name in sharded else 0
            if size and size + nbytes > limit:
                yield current
                current, size = [], 0
            current.append(piece)
            size += nbytes
    if current:
        yield current


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
        source: its index in the rank's local tensor.
        target: its index in the piece.
        shape: its shape.
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
    """Return the intersection of ``region`` and ``piece``, or None."""
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
    """Copy flat ``values`` to their place in the piece's tensor, of shape (piece.numel,)."""
    if part.flat:
        whole[part.target].copy_(values)
    else:
        rows = whole.view(piece.last - piece.first, *as_rows(piece.spec.shape)[1:])
        rows[part.target].copy_(values.view(part.shape))


def rows_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece of a whole tensor, flat and on the CPU; a view if possible."""
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
