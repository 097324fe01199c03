"""Memory as the system sees it (Linux): how much a piece of work needs, and that it begins alike for all."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_SELF = Path("/proc/self")


def trim() -> None:
    """Give back what earlier work has left, so that nobody gains from who ran before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def warm(nbytes: int) -> None:
    """Have so many free bytes at hand.

    A virtual machine gives free memory back to its host, and getting it anew costs about a second per GB: who writes
    to a file or to fresh tensors just then would pay for all that come after.
    """
    trim()
    torch.ones(nbytes, dtype=torch.uint8)


def growth(work: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory of this process grows at most while ``work`` runs."""
    trim()
    (_SELF / "clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    work()
    return peak() - before


def peak() -> int:
    """The most bytes that this process had resident, not counting what started it, which ``getrusage`` does."""
    return _status("VmHWM")


def _status(field: str) -> int:
    line = next(line for line in (_SELF / "status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
