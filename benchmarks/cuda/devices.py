"""The devices that a piece runs on: the machine's, or emulated ones in a rehearsal; in this process and on ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.testing import run_distributed
from emulated_cuda import EmulatedCuda, emulated_cuda

DEVICE = "cuda"
EMULATED = "Emulated H100"  # so that its peak is known


@contextlib.contextmanager
def devices(count: int, rehearse: bool) -> Iterator[EmulatedCuda | None]:
    """Provide ``count`` devices within the context; yields the emulation in a rehearsal."""
    if not rehearse:
        yield None
        return
    with emulated_cuda(count, name=EMULATED) as gpu:
        _emulated.append(gpu)
        try:
            yield gpu
        finally:
            _emulated.clear()


def emulated() -> EmulatedCuda | None:
    """Return the emulated devices of this process, if there are any."""
    return _emulated[0] if _emulated else None


_emulated: list[EmulatedCuda] = []


def on_ranks(fn: Callable[..., Any], ranks: int, rehearse: bool, *args: Any, timeout: float = 400.0) -> list[Any]:
    """Call ``fn(*args)`` on ranks with one device each, in an NCCL group, and return all results."""
    return run_distributed(_on_rank, ranks, fn, rehearse, args, process_group=None, timeout=timeout)


def _on_rank(fn: Callable[..., Any], rehearse: bool, args: tuple[Any, ...]) -> Any:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with devices(ranks, rehearse):
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl")
        try:
            return fn(*args)
        finally:
            torch.cuda.synchronize()
            dist.destroy_process_group()


def full_precision() -> None:
    """Multiply float32 matrices in float32, here and on ranks: results are compared to the last few bits."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
