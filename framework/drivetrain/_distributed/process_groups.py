"""Timeouts, aborts and NCCL backends of process groups. Only this module uses torch's private functions for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def set_timeout(timeout: timedelta, groups: Iterable[Any] | None = None) -> None:
    """Set the timeout of every collective of these groups; None selects every group of this process."""
    c10d: Any = dist.distributed_c10d
    setter = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # public from torch 2.15 on
    for group in list(c10d._world.pg_map) if groups is None else groups:
        with contextlib.suppress(ValueError):  # a group that this rank is not in
            setter(timeout, group)


def uses_nccl() -> bool:
    """Return True if a group of this process uses NCCL, whose waiting kernels do not notice a closed connection."""
    return bool(_nccl_backends())


def abort_nccl() -> None:
    """Abort all NCCL communicators of this process, from any thread: kernels return, and the next collective raises.

    Torch still lists the groups until `drop_groups`.
    """
    backends = _nccl_backends()
    if not backends:
        return
    # As one group, since one communicator's abort may wait for another's (pytorch/pytorch#119797).
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def drop_groups() -> None:
    """Drop all groups without waiting for other ranks, which `destroy_process_group` may do with NCCL."""
    dist.distributed_c10d._abort_process_group()


def _nccl_backends() -> list[Any]:
    """Return the NCCL backends of this process, latest group first, the order in which torch aborts them."""
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
