"""emulated_cuda: turns the emulation of CUDA on and off, and provides its findings."""

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
from emulated_cuda.building import load_extension
from emulated_cuda.findings import Copy, FreeInUse, HostSync, Operation, Race, format_findings
from emulated_cuda.sites import Sites
from emulated_cuda.torch_cuda import DeviceProperties, check_torch_version, emulated_names
from emulated_cuda.torch_nccl import emulated_nccl

_loaded: tuple[ModuleType, Sites] | None = None


class EmulatedCuda:
    """The findings of the emulated devices since `emulated_cuda` was entered or `forget` was called."""

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
        """Pairs of operations on the same bytes that no event, stream or wait orders. At least one of them writes."""
        self._collect()
        return self._races

    @property
    def frees_in_use(self) -> list[FreeInUse]:
        """Memory that was reused while another stream might still use it."""
        self._collect()
        return self._frees

    @property
    def host_syncs(self) -> list[HostSync]:
        """All waits of the host for a device, except waits for copies."""
        self._collect()
        return self._syncs

    @property
    def copies(self) -> list[Copy]:
        """All copies between the host and devices, in order."""
        self._collect()
        return self._copies

    @property
    def blocking_copies(self) -> list[Copy]:
        """Copies that the host waited for."""
        return [copy for copy in self.copies if copy.blocking]

    def forget(self) -> None:
        """Drop the findings so far, for example after a warm-up."""
        self._collect()
        for findings in (self._races, self._frees, self._syncs, self._copies):
            findings.clear()

    def report(self) -> str:
        """Return all findings as text, with the lines of code that caused them."""
        parts = {
            "races": format_findings(self.races),
            "frees in use": format_findings(self.frees_in_use),
            "host syncs": format_findings(self.host_syncs),
            "blocking copies": format_findings(self.blocking_copies),
        }
        return "\n".join(f"{name}:\n{text or '  none'}" for name, text in parts.items())

    def _collect(self) -> None:
        for finding in self._extension.take_findings():
            lines = self._sites.lines(finding["site"])
            stream = _stream(finding["device"], finding["stream"])
            if finding["kind"] == "copy":
                details = finding["op"], finding["bytes"], finding["pinned"], finding["waited"]
                self._copies.append(Copy(*details, finding["device"], stream, lines))
            elif finding["kind"] == "sync":
                self._syncs.append(HostSync(finding["op"], finding["device"], stream, lines))
            elif finding["kind"] == "overwritten":  # the host wrote to pinned memory while a copy could still read it
                operation = Operation(finding["op"], stream, lines)
                self._races.append(Race(operation, None, "write after read", finding["bytes"]))
            elif finding["kind"] == "race":
                self._races.append(self._race(finding, Operation(finding["op"], stream, lines)))
            else:
                freed_lines = self._sites.lines(finding["other_site"])
                owner = _stream(finding["other_device"], finding["other_stream"])
                self._frees.append(
                    FreeInUse(Operation(finding["op"], stream, lines), owner, freed_lines, finding["bytes"])
                )

    def _race(self, finding: dict[str, Any], later: Operation) -> Race:
        stream = _stream(finding["other_device"], finding["other_stream"])
        earlier = Operation(finding["other_op"], stream, self._sites.lines(finding["other_site"]))
        verbs = ("read", "write")
        what = f"{verbs[finding['writes']]} after {verbs[finding['other_writes']]}"
        return Race(earlier, later, what, finding["bytes"])


@contextlib.contextmanager
def emulated_cuda(
    devices: int = 1, *, name: str = "Emulated CUDA", memory: int = 80 << 30, enforce_memory: bool = False
) -> Iterator[EmulatedCuda]:
    """Emulate CUDA devices in host memory: ``with emulated_cuda(devices=2) as gpu: ...; assert not gpu.races``.

    Within the context, ``torch.cuda`` has ``devices`` devices. Operators run the CPU's kernels when they are called, so
    results equal the results on the CPU bit for bit, except random numbers. The emulation tracks the order that
    streams, events, `record_stream` and waits define, and reports operations that a real device could run in another
    order. A copy to pinned memory with ``non_blocking=True`` arrives when the host has waited for the copy. Until then
    all bytes of the pinned memory are 0xFF, so that a test notices a read that comes too early. The first `query` of an
    event returns False if nothing has waited for the event.

    The first call in a process compiles the extension if necessary, and registers operators for CUDA with torch until
    the process ends. Outside of the context there are no devices. If the calling process must not change, use another
    process, with `run_distributed` or a `World`. Tensors must not be used after the end of the context in
    which they were created. As with real devices, a forked process can use the devices only if its parent has not
    initialised the driver.

    Args:
        devices: the number of devices. ``CUDA_VISIBLE_DEVICES`` may restrict them.
        name: the return value of ``torch.cuda.get_device_name``.
        memory: the memory of each device in bytes, as ``torch.cuda.mem_get_info`` returns it.
        enforce_memory: raise ``torch.cuda.OutOfMemoryError`` if a device would hold more than ``memory``.

    Raises:
        ConfigurationError: there is no C++ compiler, torch has CUDA itself, or this torch is not supported. The first
            use of a device raises the same error class if autograd started its threads for fewer devices in an
            earlier backward pass of this process.
    """
    if type(devices) is not int or not 1 <= devices <= _MAX_DEVICES:
        raise ConfigurationError(
            f"emulated_cuda(devices={devices!r}).",
            f"devices must be an integer from 1 to {_MAX_DEVICES}.",
            "use emulated_cuda(devices=2).",
        )
    check_torch_version()
    extension, sites = _load()
    if extension.count():
        raise ConfigurationError(
            "emulated_cuda() within emulated_cuda().",
            "the devices of the outer context already exist.",
            "create all devices with one call.",
        )
    visible = _visible(devices)
    gpu = EmulatedCuda(extension, sites, len(visible))
    extension.start(visible, memory if enforce_memory else 0)
    try:
        with emulated_names(extension, len(visible), DeviceProperties(name, memory)), emulated_nccl(extension):
            torch.cuda._initialized = False
            torch.cuda._cached_device_count = None
            gpu.forget()
            yield gpu
    finally:
        extension.stop()
        gpu._collect()


_MAX_DEVICES = 64


def _load() -> tuple[ModuleType, Sites]:
    global _loaded
    if _loaded is None:
        extension = load_extension()
        sites = Sites()
        extension.set_site_function(sites.current_number)
        atexit.register(extension.stop)  # memory freed after Python's finalization must not call back into Python
        _loaded = extension, sites
    return _loaded


def _visible(devices: int) -> list[int]:
    """Return the devices in CUDA_VISIBLE_DEVICES before the first one that does not exist, as the driver does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(devices))
    parts = takewhile(lambda part: part.isdigit() and int(part) < devices, map(str.strip, visible.split(",")))
    return list(dict.fromkeys(map(int, parts)))


def _stream(device: int, stream: int) -> str:
    return f"cuda:{device}/{stream or 'default'}"
