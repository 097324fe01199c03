"""What torch keeps to itself about process groups: the one place that reaches for it."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist


def set_timeout(timeout: timedelta) -> None:
    """Let every collective of every group of this process fail after ``timeout``."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(ValueError):  # a group that this rank is not in
            dist.distributed_c10d._set_pg_timeout(timeout, group)
