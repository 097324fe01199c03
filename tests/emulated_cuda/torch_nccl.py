"""Provides torch.distributed's names for NCCL while CUDA is emulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from emulated_cuda.patches import Patches

_TIMEOUT = timedelta(minutes=10)  # the default timeout for NCCL in torch


class Options:
    """Mirrors `ProcessGroupNCCL.Options`. Only the timeout of a group has an effect."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = _TIMEOUT
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


@contextlib.contextmanager
def emulated_nccl(extension: ModuleType) -> Iterator[None]:
    """Allow process groups with backend "nccl", and restore torch's names for NCCL on exit."""
    group: Any = extension.ProcessGroupNCCL
    group.Options = Options
    group.options = property(lambda self: Options())
    group.uid = property(id)
    group.bound_device_id = None
    group._group_start = group._group_end = staticmethod(lambda: None)
    group._add_ephemeral_timeout = lambda self, timeout: None
    group._set_default_timeout = lambda self, timeout: self.set_timeout(timeout)
    group._is_initialized = lambda self: True
    group._shutdown = lambda self: self.shutdown()
    group.perform_nocolor_split = lambda self, device: None
    group._verify_work_timeout = lambda self, work, timeout: True
    c10d: Any = dist.distributed_c10d
    with contextlib.ExitStack() as stack:
        patches = Patches(stack)
        for module in (c10d, dist, torch._C._distributed_c10d):
            patches.put(module, "ProcessGroupNCCL", group)
        patches.put(c10d, "_NCCL_AVAILABLE", True)
        for module in (c10d, dist.constants):
            patches.put(module, "default_pg_nccl_timeout", _TIMEOUT)
        patches.put(torch.cuda.nccl, "version", lambda: (2, 27, 0))
        yield
