"""Ranks that tests share: started once per pytest process, and ended with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from drivetrain.testing import World
from emulated_cuda import Copy, EmulatedCuda, FreeInUse, HostSync, Race, emulated_cuda

# Imports of most test functions, done once in the fork server and inherited by all ranks.
PRELOAD = (
    "pytest",
    "torchmetrics.classification",
    "drivetrain.fit",
    "drivetrain._engine.session",
    "drivetrain_strategies.ddp.strategy",
    "drivetrain_strategies.fsdp.strategy",
)

# It decorates a function with torch.compile, whose imports would take three seconds on each rank that trains with ZeRO.
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")

DEVICES = 2  # of the emulated CUDA: autograd keeps the number of devices that it first saw

_preload = [*PRELOAD]
_emulating: list[World] = []
_worlds: dict[int, World] = {}


def preload(*modules: str) -> None:
    """Let all ranks inherit these modules too. Must be called before the first `on_ranks`."""
    _preload.extend(modules)


def preloaded() -> list[str]:
    """Return the modules inherited by ranks and by scripts that tests run, which share a fork server."""
    return [*_preload]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def on_ranks(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    process_group: str | None = "gloo",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call a function as `run_distributed` does, on ranks that other tests use: it must leave them unchanged."""
    if rehearsed := os.environ.get("REHEARSED_DEVICES"):
        fn, args = _rehearsed, (int(rehearsed), fn, args)
    world = _worlds.setdefault(nprocs, World(nprocs, preload=_preload))
    return world.run(fn, *args, process_group=process_group, timeout=timeout, env=env)


def _rehearsed(devices: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Provide emulated devices to functions that need a device (`make cuda REHEARSE=1`)."""
    with emulated_cuda(devices):
        return fn(*args)


@dataclass(frozen=True)
class Seen:
    """What a function returned on emulated CUDA, and what the emulation recorded."""

    returned: Any
    races: list[Race]
    frees_in_use: list[FreeInUse]
    host_syncs: list[HostSync]
    copies: list[Copy]
    report: str

    @property
    def blocking_copies(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.blocking]


def on_emulated_cuda(fn: Callable[..., Any], *args: Any, timeout: float = 160.0) -> Seen:
    """Call ``fn(gpu, *args)`` with emulated devices in a shared process; the first call compiles the emulation."""
    if not _emulating:
        _emulating.append(World(1, preload=_preload))
    return _emulating[0].run(_emulated, fn, args, process_group=None, timeout=timeout)[0]


def _emulated(fn: Callable[..., Any], args: tuple[Any, ...]) -> Seen:
    with emulated_cuda(DEVICES) as gpu:
        returned = fn(gpu, *args)
        return seen(gpu, returned)


def seen(gpu: EmulatedCuda, returned: Any = None) -> Seen:
    return Seen(returned, gpu.races, gpu.frees_in_use, gpu.host_syncs, gpu.copies, gpu.report())


def close_worlds() -> None:
    while _worlds:
        _worlds.popitem()[1].close()
    while _emulating:
        _emulating.pop().close()
