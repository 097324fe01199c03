"""Sizes, timeouts, aborts and NCCL backends of process groups.

Only this module uses torch's private functions for process groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def set_timeout(timeout: timedelta, groups: Iterable[Any] | None = None) -> None:
    """Set the timeout of every collective of ``groups``. None selects all groups of this process."""
    c10d: Any = dist.distributed_c10d
    setter = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # public from torch 2.15 on
    for group in list(c10d._world.pg_map) if groups is None else groups:
        with contextlib.suppress(ValueError):  # a group that this rank is not in
            setter(timeout, group)


def has_smaller_group() -> bool:
    """Return whether this rank is in a process group with some of the other ranks, but not with all of them."""
    if not dist.is_initialized():
        return False
    return any(1 < group.size() < dist.get_world_size() for group in list(dist.distributed_c10d._world.pg_map))


def uses_nccl() -> bool:
    """Return True if a group of this process uses NCCL. Waiting kernels of NCCL do not notice a closed connection."""
    return bool(_nccl_backends())


def abort_nccl() -> None:
    """Abort all NCCL communicators of this process, from any thread.

    Waiting kernels then return, and the next collective raises an error. Torch lists the groups until `drop_groups` is
    called.
    """
    backends = _nccl_backends()
    if not backends:
        return
    # All communicators are aborted within one NCCL group, because the abort of one communicator may wait for the abort
    # of another (pytorch/pytorch#119797).
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def drop_groups() -> None:
    """Drop all groups without waiting for other ranks. `destroy_process_group` may wait for them with NCCL."""
    dist.distributed_c10d._abort_process_group()


def _nccl_backends() -> list[Any]:
    """Return the NCCL backends of this process. The latest group comes first, as in torch's order of aborts."""
    if not (dist.is_initialized() and dist.is_nccl_available()):
        return []
    nccl = dist.distributed_c10d.ProcessGroupNCCL
    backends = []
    for group in reversed(list(dist.distributed_c10d._world.pg_map)):
        with contextlib.suppress(RuntimeError):  # a group without a backend for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, nccl):
                backends.append(backend)
    return backends
