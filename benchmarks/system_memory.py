"""Memory as the system reports it (Linux): how much a piece of work needs, from comparable starting conditions."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_SELF = Path("/proc/self")


def trim() -> None:
    """Return memory freed by earlier work to the system, so that later work cannot benefit from it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def warm(nbytes: int) -> None:
    """Make ``nbytes`` of free memory available.

    A virtual machine returns free memory to its host, and getting it back takes about a second per GB, which would be
    charged to whichever work writes to a file or to new tensors first.
    """
    trim()
    torch.ones(nbytes, dtype=torch.uint8)


def growth(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process grows at most while ``work`` runs."""
    trim()
    (_SELF / "clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    work()
    return peak() - before


def peak() -> int:
    """Return the peak resident memory of this process, without its parent's, which ``getrusage`` includes."""
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in (_SELF / "status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
