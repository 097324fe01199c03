"""Two nodes on one machine: network namespaces connected by a cable (a veth pair) that can be unplugged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DEVICE = "cable"
_ADDRESSES = ("10.213.0.1", "10.213.0.2")
_PORT = 29_400  # namespaces are private to the test, so every port in them is free


def why_not() -> str | None:
    """Return why namespaces cannot be used here, or None."""
    if shutil.which("ip") is None:
        return "needs ip (Debian: iproute2)"
    probe = f"drivetrain-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"needs network namespaces: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class TwoNodes:
    """The nodes, and the processes that run on them."""

    def __init__(self) -> None:
        self._names = [f"drivetrain-{os.getpid()}-{node}" for node in (0, 1)]
        self._started: list[subprocess.Popen[bytes]] = []

    def torchrun(
        self, node: int, script: str, *arguments: str, max_restarts: int, out: Path
    ) -> subprocess.Popen[bytes]:
        """Start torchrun with one process on ``node``."""
        command = [
            *("ip", "netns", "exec", self._names[node], sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_ADDRESSES[0]}:{_PORT}"),
            # torchrun determines the host of the rendezvous by the machine's name, which these nodes share.
            *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", _ADDRESSES[node]),
            *(script, *arguments),
        ]
        # The machine's name resolves to the loopback device, which cannot be reached from the other node.
        variables = os.environ | {"GLOO_SOCKET_IFNAME": _DEVICE, "PYTHONPATH": os.pathsep.join(sys.path)}
        with out.open("w") as stream:
            process = subprocess.Popen(
                command, env=variables, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._started.append(process)
        return process

    def link(self, up: bool) -> None:
        """Plug or unplug the cable: connections do not end, but no data passes."""
        _ip("-n", self._names[1], "link", "set", _DEVICE, "up" if up else "down")

    def _build(self) -> None:
        for name in self._names:
            _ip("netns", "add", name)
        ends = ("netns", self._names[0], "type", "veth"), ("peer", "name", _DEVICE, "netns", self._names[1])
        _ip("link", "add", _DEVICE, *ends[0], *ends[1])
        for name, address in zip(self._names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _DEVICE)
            for device in ("lo", _DEVICE):
                _ip("-n", name, "link", "set", device, "up")

    def _remove(self) -> None:
        for name in self._names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in inside.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for process in self._started:
            process.wait(30)


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Create the nodes within the context; processes still running on them at its end are killed."""
    nodes = TwoNodes()
    try:
        nodes._build()
        yield nodes
    finally:
        nodes._remove()
