"""What a rank holds of a tensor that is spread over several: how state travels between strategies and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offsets: where it begins, in each dimension.
        sizes: how far it goes; 0 in one of them for nothing at all.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """What ``whole[box.index]`` takes."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a tensor's elements in row-major order, from ``start`` to before ``stop``."""

    start: int
    stop: int


Region = Box | Span


@dataclass(frozen=True, slots=True, eq=False)
class ParameterShard:
    """One rank's part of a tensor.

    Attributes:
        local: what this rank holds: of the shape of its box, or of shape (n,) for a span.
        shape: of the whole.
        region: where the part lies in the whole.
        is_primary: False if another rank holds the same part and represents it, in checkpoints for example.
        gather: makes the tensor whole on every rank; collective. None where nobody can.
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
        """Return the whole. Collective."""
        if self.gather is None:
            raise TypeError(f"{self.region} of a tensor of shape {self.shape}: nobody can make it whole.")
        return self.gather()


def cut(whole: Any, region: Region | None) -> torch.Tensor:
    """Return the part of ``whole`` that ``region`` names, or all of it; contiguous."""
    if region is None:
        part = whole
    elif isinstance(region, Box):
        part = whole[region.index]
    else:
        part = whole.reshape(-1)[region.start : region.stop]
    return part.contiguous()  # type: ignore[no-any-return]


def paste(whole: torch.Tensor, part: torch.Tensor, region: Region) -> None:
    """Write ``part`` into ``whole``, which is contiguous, where ``region`` says."""
    if isinstance(region, Box):
        whole[region.index].copy_(part)
    else:
        whole.view(-1)[region.start : region.stop].copy_(part)
