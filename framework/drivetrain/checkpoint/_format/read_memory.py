"""Memory that tensors are read into, asked for only where there can be as much."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

import torch

from drivetrain.errors import CheckpointError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def allocate_tensor(numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Return a new tensor on the CPU, of shape (numel,), whose values are to come.

    Raises:
        CheckpointError: there is no room; says so of ``what``.
    """
    check_memory(numel * dtype.itemsize, what)
    try:
        return torch.empty(numel, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise _too_large(numel * dtype.itemsize, what, "the system gives no more") from error


def allocate_bytes(count: int) -> memoryview:
    """Return memory that holds anything; a bytearray would be filled with zeros first."""
    return memoryview(torch.empty(count, dtype=torch.uint8, device="cpu").numpy())  # type: ignore[arg-type]


def check_memory(nbytes: int, what: str) -> None:
    """Refuse what this machine, or the container, has no memory for.

    Raises:
        CheckpointError: says so of ``what``.
    """
    most = _memory_limit()
    if nbytes > most:
        raise _too_large(nbytes, what, f"{most:,} bytes are all that there is here")


def _too_large(nbytes: int, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{what} takes {nbytes:,} bytes of memory.",
        f"{why}.",
        "take another checkpoint if it cannot be that large; else read it on more ranks, or tensor by tensor.",
    )


@functools.cache
def _memory_limit() -> int:
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # another system, or "max"
            found.append(int(Path(path).read_text()))
    return min(found)
