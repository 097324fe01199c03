"""The devices that a piece runs on: the machine's, or in a rehearsal emulated ones; in this process and on ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.testing import EmulatedCuda, emulated_cuda, run_distributed

DEVICE = "cuda"
EMULATED = "Emulated H100"  # so that its peak is known


@contextlib.contextmanager
def devices(count: int, rehearse: bool) -> Iterator[EmulatedCuda | None]:
    """Within it there are so many; yields what the emulated ones see."""
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
    """The emulated devices of this process, where there are any."""
    return _emulated[0] if _emulated else None


_emulated: list[EmulatedCuda] = []


def on_ranks(fn: Callable[..., Any], ranks: int, rehearse: bool, *args: Any, timeout: float = 400.0) -> list[Any]:
    """Call ``fn(*args)`` on ranks of a device each, in a group on NCCL, and return what each returned."""
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
    """Multiply float32 matrices as float32, here and on ranks: what is compared is compared to a few last bits."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
