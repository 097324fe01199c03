"""ParameterShard: a rank's part of a sharded tensor. Strategies and checkpoints exchange state in this form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offsets: the start of the box in each dimension.
        sizes: the length of the box in each dimension. A box with a length of 0 is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that selects the box: ``whole[box.index]``."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous range of a tensor's elements in row-major order, from ``start`` up to but excluding ``stop``."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return max(0, self.stop - self.start)


Region = Box | Span


def region_from(bounds: Sequence[Any]) -> Region:
    """Return the region from its two fields, as `dataclasses.astuple` returns them."""
    first, second = bounds
    return Box(first, second) if isinstance(first, tuple) else Span(first, second)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """One rank's part of a tensor.

    Attributes:
        local: the elements of this rank, with the sizes of a box as the shape, or with shape (n,) for a span.
        shape: the shape of the whole tensor.
        region: the position of the part in the whole tensor.
        is_primary: whether this rank provides the part for checkpoints and checksums. If several ranks hold the same
            part, only one of them has True.
        gather: a collective function that returns the whole tensor on every rank, or None if the tensor cannot be
            gathered.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    is_primary: bool = True
    gather: Callable[[], torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor. Collective."""
        if self.gather is None:
            raise TypeError(f"The shard {self.region} of a tensor of shape {self.shape} cannot be gathered.")
        return self.gather()


def cut(whole: Any, region: Region | None) -> torch.Tensor:
    """Return the part of ``whole`` at ``region`` as a contiguous tensor. None selects the whole tensor."""
    if region is None:
        part = whole
    elif isinstance(region, Box):
        part = whole[region.index]
    else:
        part = whole.reshape(-1)[region.start : region.stop]
    return part.contiguous()  # type: ignore[no-any-return]
