"""The device of the suite: the CPU, or the one that `make cuda` requests by these environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from oracle.nets import DEVICE as DEVICE

RANKS = int(os.environ.get("PARITY_RANKS", "1"))
"""On a device: how many ranks each strategy runs on, of a device each."""
CASES = set(filter(None, os.environ.get("PARITY_CASES", "").split(",")))
"""On a device: the cases that are run; empty for all."""
STRATEGIES = {*("single_device", "ddp", "fsdp"), *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")}
"""Those that are compared on a device."""

BF16 = 2.0**-8
TOLERANCES = {"32-true": 1e-4, "64-true": 1e-10, "bf16-mixed": 4 * BF16, "16-mixed": BF16, "bf16-true": 8 * BF16}
"""By precision, on a device, where the same product of matrices may be rounded in another way at another address."""


@contextlib.contextmanager
def group(rank: int) -> Iterator[None]:
    """Set this rank's device and create an NCCL group within the context."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()
