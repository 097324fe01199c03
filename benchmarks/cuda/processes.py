"""Runs a command with a time limit, and ends everything that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEARTBEAT = 30.0  # seconds between two progress messages


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended.

    Attributes:
        code: its exit code, negative for a signal; None if it reached the time limit.
        seconds: how long it took.
        tail: the last lines that it printed.
    """

    code: int | None
    seconds: float
    tail: str

    @property
    def how(self) -> str:
        """Describe the end in words."""
        if self.code is None:
            return f"its time was over after {self.seconds:.0f} s"
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        return f"it ended with code {self.code}"


def run(command: Sequence[str], seconds: float, log: Path, variables: Mapping[str, str], name: str) -> CommandEnd:
    """Run a command in a session of its own, with its output in a file; print progress messages."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    next_sign = began + _HEARTBEAT
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            while time.monotonic() - began < seconds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.2)
                    break
                if time.monotonic() > next_sign:
                    print(f"    {name} is at work, {time.monotonic() - began:.0f} s", flush=True)
                    next_sign += _HEARTBEAT
        finally:
            _end_session(process.pid)
            process.wait()
    text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return CommandEnd(code, time.monotonic() - began, "\n".join(text[-25:]))


def _end_session(session: int) -> None:
    """End the remaining processes of a command: its ranks may have their own process groups, but share its session."""
    for _ in range(3):  # repeated, for processes that were being started during the first look
        members = _members(session)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return
        time.sleep(0.05)


def _members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, _, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its) == session and state != "Z":
                    found.append(int(entry.name))
    return found
