"""What torch keeps to itself about process groups: the one place that reaches for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def set_timeout(timeout: timedelta, groups: Iterable[Any] | None = None) -> None:
    """Let every collective of these groups fail after ``timeout``; None for every group of this process."""
    private: Any = dist.distributed_c10d
    setter = getattr(dist, "set_timeout", None) or private._set_pg_timeout  # public from torch 2.15 on
    for group in list(private._world.pg_map) if groups is None else groups:
        with contextlib.suppress(ValueError):  # a group that this rank is not in
            setter(timeout, group)


def uses_nccl() -> bool:
    """Whether a group of this process runs on NCCL, where a rank waits in a kernel that no closed connection ends."""
    return bool(_nccl_backends())


def abort_nccl() -> None:
    """End what runs on NCCL in this process, from any thread: kernels return, and the next collective raises.

    The groups stay known to torch until `drop_groups`.
    """
    backends = _nccl_backends()
    if not backends:
        return
    # Together, since one communicator's abort may wait for another's (pytorch/pytorch#119797).
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def drop_groups() -> None:
    """Let go of all groups without waiting for other ranks, which `destroy_process_group` may do on NCCL."""
    dist.distributed_c10d._abort_process_group()


def _nccl_backends() -> list[Any]:
    """Latest group first, as torch aborts them."""
    if not (dist.is_initialized() and dist.is_nccl_available()):
        return []
    kind = dist.distributed_c10d.ProcessGroupNCCL
    found = []
    for group in reversed(list(dist.distributed_c10d._world.pg_map)):
        with contextlib.suppress(RuntimeError):  # a group without a backend for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, kind):
                found.append(backend)
    return found
