"""Switching the emulation of CUDA on and off, and reading what it has seen."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from itertools import takewhile
from types import ModuleType
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.testing._emulated_cuda.building import load_extension
from drivetrain.testing._emulated_cuda.findings import Copy, FreeInUse, HostSync, Operation, Race, told
from drivetrain.testing._emulated_cuda.sites import Sites
from drivetrain.testing._emulated_cuda.torch_cuda import DeviceProperties, in_place, refuse_another_torch
from drivetrain.testing._emulated_cuda.torch_nccl import nccl_in_place

_loaded: tuple[ModuleType, Sites] | None = None


class EmulatedCuda:
    """What the emulated devices have seen since `emulated_cuda` was entered, or since `forget`."""

    def __init__(self, extension: ModuleType, sites: Sites, devices: int) -> None:
        self.devices = devices
        self._extension = extension
        self._sites = sites
        self._races: list[Race] = []
        self._frees: list[FreeInUse] = []
        self._syncs: list[HostSync] = []
        self._copies: list[Copy] = []

    @property
    def races(self) -> list[Race]:
        """Pairs of operations on the same bytes, one of them a write, that no event, stream or wait orders."""
        self._look()
        return self._races

    @property
    def frees_in_use(self) -> list[FreeInUse]:
        """Memory that was given out again while another stream might still use it."""
        self._look()
        return self._frees

    @property
    def host_syncs(self) -> list[HostSync]:
        """Where the host waited for a device, copies apart."""
        self._look()
        return self._syncs

    @property
    def copies(self) -> list[Copy]:
        """All copies between the host and devices, in order."""
        self._look()
        return self._copies

    @property
    def blocking_copies(self) -> list[Copy]:
        """Those copies that the host waited for."""
        return [copy for copy in self.copies if copy.blocking]

    def forget(self) -> None:
        """Begin anew: after a warm-up, say."""
        self._look()
        for findings in (self._races, self._frees, self._syncs, self._copies):
            findings.clear()

    def report(self) -> str:
        """Return all of it as text, with the lines of code that it came from."""
        parts = {
            "races": told(self.races),
            "frees in use": told(self.frees_in_use),
            "host syncs": told(self.host_syncs),
            "blocking copies": told(self.blocking_copies),
        }
        return "\n".join(f"{name}:\n{text or '  none'}" for name, text in parts.items())

    def _look(self) -> None:
        for found in self._extension.take_findings():
            where = self._sites.lines(found["site"])
            stream = _stream(found["device"], found["stream"])
            if found["kind"] == "copy":
                how = found["op"], found["bytes"], found["pinned"], found["waited"]
                self._copies.append(Copy(*how, found["device"], stream, where))
            elif found["kind"] == "sync":
                self._syncs.append(HostSync(found["op"], found["device"], stream, where))
            elif found["kind"] == "overwritten":
                operation = Operation(found["op"], stream, where)
                self._races.append(Race(operation, None, "write after read", found["bytes"]))
            elif found["kind"] == "race":
                self._races.append(self._race(found, Operation(found["op"], stream, where)))
            else:
                freed = self._sites.lines(found["other_site"])
                owner = _stream(found["other_device"], found["other_stream"])
                self._frees.append(FreeInUse(Operation(found["op"], stream, where), owner, freed, found["bytes"]))

    def _race(self, found: dict[str, Any], later: Operation) -> Race:
        stream = _stream(found["other_device"], found["other_stream"])
        earlier = Operation(found["other_op"], stream, self._sites.lines(found["other_site"]))
        verbs = ("read", "write")
        what = f"{verbs[found['writes']]} after {verbs[found['other_writes']]}"
        return Race(earlier, later, what, found["bytes"])


@contextlib.contextmanager
def emulated_cuda(
    devices: int = 1, *, name: str = "Emulated CUDA", memory: int = 80 << 30, enforce_memory: bool = False
) -> Iterator[EmulatedCuda]:
    """Emulate CUDA devices in the host's memory: ``with emulated_cuda(devices=2) as gpu: ...; assert not gpu.races``.

    Within, ``torch.cuda`` has that many devices. Operators run the host's kernels at once, so that numbers are the
    CPU's to the last bit (those of generators apart), while streams, events, `record_stream` and waits are followed:
    what a real device could run in another order is listed. A copy to pinned memory with ``non_blocking=True`` arrives
    when the host has waited for it; until then all bits of the memory are set. An event that nobody has waited for
    answers False to its first `query`.

    The first call in a process compiles the extension where that was not done before, and makes operators for CUDA
    known to torch for as long as the process lives. Outside of ``with`` there are no devices, but a process that is
    to be as it was had better be another one: call a function by `run_distributed` or a `World` of your own. Tensors
    must not be used after the ``with`` they were made in. A forked process can use the devices unless the one that it
    comes from has asked the driver for anything, as with real ones.

    Args:
        devices: how many there are. ``CUDA_VISIBLE_DEVICES`` may show some of them alone.
        name: what ``torch.cuda.get_device_name`` returns.
        memory: bytes of each device, as ``torch.cuda.mem_get_info`` returns them.
        enforce_memory: raise ``torch.cuda.OutOfMemoryError`` where a device would hold more.

    Raises:
        ConfigurationError: there is no C++ compiler, or torch has a CUDA of its own or does not fit. The first use of a
            device raises it where a backward in this process came before, and autograd knows of fewer devices.
    """
    if type(devices) is not int or not 1 <= devices <= _MOST:
        raise ConfigurationError(
            f"emulated_cuda(devices={devices!r}).",
            f"it is how many devices there are, 1 to {_MOST}.",
            "use emulated_cuda(devices=2).",
        )
    refuse_another_torch()
    extension, sites = _load()
    if extension.count():
        raise ConfigurationError(
            "emulated_cuda() within emulated_cuda().",
            "the devices of the outer one are there already.",
            "ask for as many devices as are needed once.",
        )
    visible = _visible(devices)
    gpu = EmulatedCuda(extension, sites, len(visible))
    extension.start(visible, memory if enforce_memory else 0)
    try:
        with in_place(extension, len(visible), DeviceProperties(name, memory)), nccl_in_place(extension):
            torch.cuda._initialized = False
            torch.cuda._cached_device_count = None
            gpu.forget()
            yield gpu
    finally:
        extension.stop()
        gpu._look()


_MOST = 64


def _load() -> tuple[ModuleType, Sites]:
    global _loaded
    if _loaded is None:
        extension = load_extension()
        sites = Sites()
        extension.ask_for_sites(sites.here)
        atexit.register(extension.stop)  # frees that come after Python's end ask nobody where they are
        _loaded = extension, sites
    return _loaded


def _visible(devices: int) -> list[int]:
    """The devices that CUDA_VISIBLE_DEVICES shows, up to the first that is not there, as the driver takes it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(range(devices))
    parts = takewhile(lambda part: part.isdigit() and int(part) < devices, map(str.strip, named.split(",")))
    return list(dict.fromkeys(map(int, parts)))


def _stream(device: int, stream: int) -> str:
    return f"cuda:{device}/{stream or 'default'}"
