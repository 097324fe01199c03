"""Allocates memory for tensors that are read, after checking that the machine has enough memory."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

import torch

from drivetrain.errors import CheckpointError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def allocate_tensor(numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a new uninitialized CPU tensor of shape (numel,).

    Raises:
        CheckpointError: there is not enough memory; the message names ``what``.
    """
    check_memory(numel * dtype.itemsize, what)
    try:
        return torch.empty(numel, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise _memory_error(numel * dtype.itemsize, what, "the allocation failed") from error


def allocate_bytes(count: int) -> memoryview:
    """Return ``count`` bytes of uninitialized memory. A bytearray would be filled with zeros first."""
    return memoryview(torch.empty(count, dtype=torch.uint8, device="cpu").numpy())  # type: ignore[arg-type]


def check_memory(nbytes: int, what: str) -> None:
    """Raise if ``nbytes`` exceed the memory of the machine or container.

    Raises:
        CheckpointError: there is not enough memory; the message names ``what``.
    """
    limit = _memory_limit()
    if nbytes > limit:
        raise _memory_error(nbytes, what, f"this machine or container has {limit:,} bytes")


def _memory_error(nbytes: int, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"Not enough memory to read {what}: {nbytes:,} bytes of memory are needed.",
        f"{why}.",
        "if this size is wrong, use another checkpoint; otherwise read it on more ranks, or tensor by tensor.",
    )


@functools.cache
def _memory_limit() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # the file does not exist, or says "max"
            limits.append(int(Path(path).read_text()))
    return min(limits)
