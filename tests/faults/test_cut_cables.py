"""Under torchrun --max-restarts a run resumes by itself after a rank was killed, and after a node had lost its link.

Rows B-01, F-02, G-02, G-04. This file is also the script of the run, which records its starts, steps and results.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing_run import STRATEGIES, train

from drivetrain.testing import requires_linux, run_distributed
from drivetrain_strategies import DDPStrategy

LIMIT = 90.0  # seconds
TIMEOUT = 4.0  # seconds for which the ranks of a slow run wait for each other


# Two nodes are network namespaces, connected by a cable (a veth pair) that can be unplugged.
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
    def __init__(self) -> None:
        self.names = [f"drivetrain-{os.getpid()}-{node}" for node in (0, 1)]
        self.started: list[subprocess.Popen[bytes]] = []

    def torchrun(self, node: int, max_restarts: int, out: Path, *script: str) -> subprocess.Popen[bytes]:
        command = [
            *("ip", "netns", "exec", self.names[node], sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(max_restarts)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_ADDRESSES[0]}:{_PORT}"),
            # torchrun determines the host of the rendezvous by the machine's name, which these nodes share.
            *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", _ADDRESSES[node]),
            *script,
        ]
        # The machine's name resolves to the loopback device, which cannot be reached from the other node.
        variables = os.environ | {"GLOO_SOCKET_IFNAME": _DEVICE, "PYTHONPATH": os.pathsep.join(sys.path)}
        merged: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
        with out.open("w") as stream:
            self.started.append(subprocess.Popen(command, env=variables, stdout=stream, **merged))
        return self.started[-1]

    def link(self, up: bool) -> None:
        """Plug or unplug the cable: connections do not end, but no data passes."""
        _ip("-n", self.names[1], "link", "set", _DEVICE, "up" if up else "down")


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Create the nodes within the context; processes still running on them at its end are killed."""
    nodes = TwoNodes()
    first, second = nodes.names
    try:
        for name in nodes.names:
            _ip("netns", "add", name)
        _ip("link", "add", _DEVICE, "netns", first, "type", "veth", "peer", "name", _DEVICE, "netns", second)
        for name, address in zip(nodes.names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _DEVICE)
            for device in ("lo", _DEVICE):
                _ip("-n", name, "link", "set", device, "up")
        yield nodes
    finally:
        for name in nodes.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in inside.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for process in nodes.started:
            process.wait(30)


def _undisturbed(folder: Path) -> Any:
    task = folder / "undisturbed", "ddp", 1, False, print
    return run_distributed(train, 2, *task, process_group=None, timeout=150)


def _results(folder: Path) -> list[Any]:
    return [json.loads((folder / f"results-{rank}").read_text()) for rank in (0, 1)]


def _starts(folder: Path) -> list[int]:
    """Return the step at which each start of rank 0 began training."""
    return [int(step) for step in (folder / "starts-0").read_text().split()]


@requires_linux()
def test_a_killed_worker_is_restarted_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", __file__, str(tmp_path), "killed"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    undisturbed = _undisturbed(tmp_path)
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 0, printed
    assert _starts(tmp_path) == [0, 2]  # from the last complete checkpoint
    assert _results(tmp_path) == undisturbed


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.05)


@pytest.mark.skipif("FAULTS" not in os.environ, reason="a minute of waiting for timeouts: make faults")
@pytest.mark.timeout(4 * LIMIT)
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_link_that_goes_down(comes_back: bool, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    outs, step = [tmp_path / f"node-{node}" for node in (0, 1)], tmp_path / "step-0"
    with two_nodes() as nodes:
        script = __file__, str(tmp_path), "slow"
        runs = [nodes.torchrun(node, 2 * comes_back, outs[node], *script) for node in (0, 1)]
        _wait_until(lambda: step.exists() and int(step.read_text() or 0) >= 3, "step 3")
        nodes.link(up=False)
        down = time.monotonic()
        _wait_until(lambda: "Rank 0 has lost rank 1" in outs[0].read_text(), "the loss of rank 1")
        assert time.monotonic() - down < TIMEOUT + 20  # G-04
        if not comes_back:
            assert runs[0].wait(LIMIT) == 1
            # Its torchrun waits until the system gives up the connection; its rank does not.
            _wait_until(lambda: "Rank 1 has lost the store" in outs[1].read_text(), "the loss of the store")
            return
        nodes.link(up=True)
        for run in runs:
            assert run.wait(LIMIT) == 0, [out.read_text() for out in outs]
    first, *later = _starts(tmp_path)
    assert (first, min(later) >= 2) == (0, True), later
    assert _results(tmp_path) == _undisturbed(tmp_path)


def main(folder: Path, how: str) -> None:
    """If "killed", kill rank 1 in its third step; if "slow", let each step take a moment."""
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

    def tell(what: str, *values: Any) -> None:
        if what == "from":
            with (folder / f"starts-{rank}").open("a") as file:
                file.write(f"{values[0]}\n")
        if what == "step":
            (folder / f"step-{rank}").write_text(str(values[0]))
            time.sleep(0.2 * (how == "slow"))
            if (how, restarts, rank, *values) == ("killed", "0", "1", 3):
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    if how == "slow":
        STRATEGIES["ddp"] = partial(DDPStrategy, timeout=timedelta(seconds=TIMEOUT))
    every = 2 if how == "slow" else 1  # the link goes down after step 3, and not within a save
    result = train(folder / "run", "ddp", every, False, tell)
    (folder / f"results-{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
