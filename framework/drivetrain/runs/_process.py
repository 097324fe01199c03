"""The process that a run's rank 0 is, and the job that it belongs to: by them a run that lives is told from a dead one.

Source: proc(5) for what tells two processes of one number apart; Slurm's sbatch(1) for ``SLURM_RESTART_COUNT``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from drivetrain.launchers._torchrun_variables import DEFAULT_RUN_ID


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as other machines may read of it.

    Attributes:
        host: the name of its machine.
        pid: its number there.
        began: when it began, in the kernel's clock ticks since boot; "" where the system does not say.
        boot: identifies the boot of that machine; likewise.
        namespace: in which its number counts: containers on one machine each have their own; likewise.
    """

    host: str
    pid: int
    began: str = ""
    boot: str = ""
    namespace: str = ""

    @classmethod
    def here(cls) -> Self:
        """Return this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _began(pid), *_where())

    @classmethod
    def from_json(cls, document: Any) -> Self | None:
        """Read what `as_json` gave; None where it is something else."""
        if not isinstance(document, Mapping):
            return None
        texts = [document.get(name, "") for name in ("host", "began", "boot", "namespace")]
        pid = document.get("pid")
        if type(pid) is not int or not 0 < pid < 2**31 or not all(isinstance(one, str) for one in texts):
            return None
        host, began, boot, namespace = texts
        return cls(host, pid, began, boot, namespace)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        return asdict(self)

    def lives(self) -> bool | None:
        """Whether it lives; None where that cannot be seen from here: on another machine, or in another container."""
        if (self.host, self.boot, self.namespace) != (socket.gethostname(), *_where()):
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is somebody else's, and what is known of it may be hidden from us
            return _began(self.pid) in (self.began, "")
        return _began(self.pid) == self.began


@dataclass(frozen=True, slots=True)
class Job:
    """What a cluster started this process as: the same job comes back when it is queued, or restarted, again.

    Attributes:
        kind: "slurm" or "elastic" (torchrun).
        name: SLURM's number of the job, or torchrun's id of the run.
        restarts: how often it was started before.
        step: SLURM's number of the step, of which a job may run several at once; "" elsewhere.
    """

    kind: str
    name: str
    restarts: int = 0
    step: str = ""

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> list[Self]:
        """Return the jobs that a process with these environment variables belongs to, the outermost first."""
        found = []
        slurm = variables.get("SLURM_JOB_ID") or variables.get("SLURM_JOBID")
        if slurm:
            step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID") or ""
            found.append(cls("slurm", slurm, _number(variables.get("SLURM_RESTART_COUNT")), step))
        elastic = variables.get("TORCHELASTIC_RUN_ID")
        if elastic not in (None, "", "none", DEFAULT_RUN_ID):  # torchrun says "none" where nobody has named it
            found.append(cls("elastic", elastic, _number(variables.get("TORCHELASTIC_RESTART_COUNT"))))
        return found

    @classmethod
    def from_json(cls, document: Any) -> list[Self]:
        """Read a list of what `as_json` gave; what is something else is left out."""
        found = []
        for one in document if isinstance(document, list) else []:
            if isinstance(one, Mapping):
                kind, name, restarts, step = (one.get(key) for key in ("kind", "name", "restarts", "step"))
                if isinstance(kind, str) and isinstance(name, str) and type(restarts) is int and isinstance(step, str):
                    found.append(cls(kind, name, restarts, step))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        return asdict(self)

    def is_same(self, other: Job) -> bool:
        """Whether ``other`` is this job, started as often or not."""
        return (self.kind, self.name) == (other.kind, other.name)

    def outlives(self, other: Job) -> bool:
        """Whether this is the same job, and what ran as ``other`` must have ended for it to run.

        Two steps of a SLURM job that was queued once may run side by side.
        """
        beside = self.step != other.step and self.restarts == other.restarts
        return self.is_same(other) and not beside


def must_have_ended(ours: list[Job], theirs: list[Job]) -> bool:
    """Whether we are the same job, and run in place of what it was."""
    return any(one.outlives(other) for one in ours for other in theirs)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _began(pid: int) -> str:
    """When a process began, in clock ticks since boot; "" where the system does not say.

    One that has ended, and whose parent has not asked for its exit code yet, has another answer than it ever had.
    """
    try:
        # Its name, in parentheses, may hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    state, began = fields[0], fields[19]
    return "ended" if state in "ZX" else began


@cache
def _where() -> tuple[str, str]:
    """Which boot of which machine this is, and in which namespace processes are numbered."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return boot, namespace
