"""Checks whether this process can be forked safely."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def why_not_fork() -> str | None:
    """Return why a forked copy of this process would not work, or None if a forked copy would work."""
    if sys.platform in ("darwin", "win32"):
        return f"on {sys.platform} a forked copy of a process that uses the system's frameworks is unsafe or impossible"
    if torch.cuda.is_initialized() or torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        return "this process has used CUDA or an XPU, which does not work in a forked copy"
    if _has_threads_of("pt_autograd"):
        return "a backward pass has started autograd's device threads, which a forked copy lacks"
    if dist.is_available() and dist.is_initialized():
        return "this process has a process group, whose threads and connections a forked copy lacks"
    return None


def _has_threads_of(name: str) -> bool:
    """Return True if a thread of this process has a name that starts with ``name``. Without /proc, return False."""
    for file in Path("/proc/self/task").glob("*/comm"):
        try:
            if file.read_text().startswith(name):
                return True
        except OSError:  # the thread has ended
            continue
    return False
