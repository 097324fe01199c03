"""Identifies the process and the cluster job of a run's rank 0, to tell live runs from dead runs.

References: proc(5) for what distinguishes processes with the same pid; Slurm's sbatch(1) for ``SLURM_RESTART_COUNT``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified across machines.

    Attributes:
        host: the machine's host name.
        pid: the process id.
        began: the process's start time in clock ticks since boot; "" if unknown.
        boot: id of the machine's boot; "" if unknown.
        namespace: the process's pid namespace, which differs between containers; "" if unknown.
    """

    host: str
    pid: int
    began: str = ""
    boot: str = ""
    namespace: str = ""

    @classmethod
    def here(cls) -> Self:
        """Return the current process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start_time(pid), *_boot_and_namespace())

    @classmethod
    def from_json(cls, document: Any) -> Self | None:
        """Return the process of which `dataclasses.asdict` made ``document``; None if ``document`` has another form."""
        if not isinstance(document, Mapping):
            return None
        texts = [document.get(name, "") for name in ("host", "began", "boot", "namespace")]
        pid = document.get("pid")
        if type(pid) is not int or not 0 < pid < 2**31 or not all(isinstance(entry, str) for entry in texts):
            return None
        host, began, boot, namespace = texts
        return cls(host, pid, began, boot, namespace)

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; None if it is on another machine or in another container."""
        if (self.host, self.boot, self.namespace) != (socket.gethostname(), *_boot_and_namespace()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process, whose /proc entry may be hidden
            return _start_time(self.pid) in (self.began, "")
        return _start_time(self.pid) == self.began


@dataclass(frozen=True, slots=True)
class Job:
    """A cluster job that started a process. A requeued or restarted job keeps its name.

    Attributes:
        kind: "slurm" or "elastic" (torchrun).
        name: SLURM's job id, or torchrun's run id.
        restarts: how often the job was restarted.
        step: SLURM's step id, which tells apart the concurrent steps of a job; "" for other kinds.
    """

    kind: str
    name: str
    restarts: int = 0
    step: str = ""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> list[Self]:
        """Return the jobs that a process with these environment variables belongs to, outermost first."""
        jobs = []
        slurm = variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID")
        if slurm:
            step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or ""
            jobs.append(cls("slurm", slurm, _number(variables.get("SLURM_RESTART_COUNT")), step))
        elastic = variables.get("TORCHELASTIC_RUN_ID")
        if elastic not in (None, "", "none"):  # torchrun's default is "none"
            jobs.append(cls("elastic", elastic, _number(variables.get("TORCHELASTIC_RESTART_COUNT"))))
        return jobs

    @classmethod
    def from_json(cls, document: Any) -> list[Self]:
        """Return the jobs of which `asdict` made the entries of ``document``. Invalid entries are skipped."""
        jobs = []
        for entry in document if isinstance(document, list) else []:
            if isinstance(entry, Mapping):
                kind, name, restarts, step = (entry.get(key) for key in ("kind", "name", "restarts", "step"))
                if isinstance(kind, str) and isinstance(name, str) and type(restarts) is int and isinstance(step, str):
                    jobs.append(cls(kind, name, restarts, step))
        return jobs

    def is_same(self, other: Job) -> bool:
        """Return whether ``other`` is the same job, regardless of its restart count."""
        return (self.kind, self.name) == (other.kind, other.name)

    def replaces(self, other: Job) -> bool:
        """Return whether this is the same job and ``other`` must have ended before it started.

        Different steps of a SLURM job with the same restart count may run concurrently.
        """
        concurrent = self.step != other.step and self.restarts == other.restarts
        return self.is_same(other) and not concurrent


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _start_time(pid: int) -> str:
    """Return a process's start time in clock ticks since boot; "" if unknown.

    For a zombie (a process that has ended but was not reaped), the result is "ended", which is no start time.
    """
    try:
        # The command name, in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, began = fields[0], fields[19]
    return "ended" if state in "ZX" else began


@cache
def _boot_and_namespace() -> tuple[str, str]:
    """Return the machine's boot id and the pid namespace of this process."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return boot, namespace
