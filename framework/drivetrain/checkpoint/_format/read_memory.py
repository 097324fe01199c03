"""Allocates memory for tensors that are read."""

from __future__ import annotations

import torch

from drivetrain.errors import CheckpointError


def allocate_tensor(numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a new uninitialized CPU tensor of shape (numel,).

    Raises:
        CheckpointError: there is not enough memory; the message names ``what``.
    """
    try:
        return torch.empty(numel, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"Not enough memory to read {what}: {numel * dtype.itemsize:,} bytes of memory are needed.",
            "the allocation failed.",
            "read the checkpoint on more ranks, or tensor by tensor.",
        ) from error


def allocate_bytes(count: int) -> memoryview:
    """Return ``count`` bytes of uninitialized memory. A bytearray would be filled with zeros first."""
    return memoryview(torch.empty(count, dtype=torch.uint8, device="cpu").numpy())  # type: ignore[arg-type]
