"""One life of a run: from a start until all its ranks have ended, by themselves or not."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from drawing_run import train
from striking import Fault

from drivetrain.checkpoint import load, verify
from drivetrain.environments import Placement
from drivetrain.launchers import FunctionLauncher, RankFailedError

_HUNG = 100.0  # seconds after which remaining ranks write their stacks to the run's log and are ended
_GRACE = 0.5  # seconds for ranks that wait for a lost one, until the launcher ends them


@dataclass
class Run:
    """What persists between lives of a run: settings, and a folder."""

    folder: Path
    strategy: str
    every: int
    in_background: bool

    @property
    def ranks(self) -> int:
        return 1 if self.strategy == "single" else 2

    @property
    def saves(self) -> Path:
        """Return the folder of its checkpoints: its single run folder, once it has saved anything."""
        found = [one for one in self.folder.glob("drivetrain_logs/version_*/checkpoints") if any(one.glob("epoch=*"))]
        assert len(found) <= 1, found
        return found[0] if found else self.folder / "nothing saved yet"

    def names(self) -> set[str]:
        return set(os.listdir(self.saves)) if self.saves.exists() else set()

    def leftovers(self) -> set[str]:
        """Return remains of interrupted saves and removals."""
        return {name for name in self.names() if name.startswith(".")}

    def checkpoints(self) -> set[str]:
        return {name for name in self.names() if name.startswith("epoch=")}

    def newest_step(self) -> int:
        """Return the optimizer step of the newest checkpoint. Every entry with a checkpoint's name is complete."""
        for name in self.checkpoints():
            assert verify(self.saves / name) == [], f"{name} is torn"
        return max((load(self.saves / name).progress["global_step"] for name in self.checkpoints()), default=0)


@dataclass
class Life:
    """One start of a run, and the events that its ranks reported."""

    run: Run
    began_at: int = 0
    reached: int = 0
    losses: dict[Any, float] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """From the first step to the end."""
    waited: float = 0.0
    """From the kill, or from when the fault struck, to the end."""
    calls: dict[int, dict[str, int]] = field(default_factory=dict)
    """How often each rank came to each place at which a fault could have struck it."""
    struck: float | None = None
    """When the fault struck, by the clock that all processes share."""
    error: BaseException | None = None
    hung: bool = False
    """Whether ranks had to be ended because nothing else did."""

    @property
    def ended(self) -> bool:
        """Whether all ranks finished."""
        return len(self.results) == self.run.ranks

    def live(
        self, kill_after: float = float("inf"), victims: list[int] | None = None, fault: Fault | None = None
    ) -> Life:
        """Run until all ranks have ended, the victims by a kill at an instant after the first step or by a fault."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(self.run.ranks)]
        killer = _Killer(self, [ours for ours, _ in pipes], kill_after, victims or [])
        killer.start()
        try:
            whole = Placement(0, self.run.ranks, 0, self.run.ranks)
            launcher = FunctionLauncher("fork") if fault else FunctionLauncher("fork", grace=_GRACE)
            launcher.launch_all(whole, _live, self.run, [theirs for _, theirs in pipes], fault)
        except RankFailedError as error:
            # G-02: the killed rank is named, rather than one that failed as a consequence.
            self.error = error
            if fault is None and (
                killer.killed_at is None or error.failure.rank not in killer.victims or not error.failure.signal_name
            ):
                raise
        except BaseException as error:
            self.error = error
            if fault is None:
                raise
        finally:
            over = time.monotonic()
            for _, theirs in pipes:
                theirs.close()
            killer.join()
        self.seconds = over - killer.began_at
        since = killer.killed_at if fault is None else self.struck
        self.waited = 0.0 if since is None else over - since
        return self


class _Killer(threading.Thread):
    """Records the events of the ranks, and kills some of them at the given instant."""

    def __init__(self, life: Life, pipes: list[Connection], instant: float, victims: list[int]) -> None:
        super().__init__(daemon=True)
        self.victims = victims
        self.began_at = time.monotonic()
        self.killed_at: float | None = None
        self._life = life
        self._pipes = pipes
        self._instant = instant
        self._processes: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._hung_at = time.monotonic() + _HUNG

    def run(self) -> None:
        pipes: list[Any] = list(self._pipes)
        while pipes:
            until_hung = max(0.0, self._hung_at - time.monotonic())
            pause = self._pause()
            ready: list[Any] = wait(pipes, until_hung if pause is None else min(pause, until_hung))
            for pipe in ready:
                try:
                    self._take_down(self._pipes.index(pipe), *pipe.recv())
                except (EOFError, OSError):
                    pipes.remove(pipe)
            if self._pause() == 0:
                self._kill()
            if time.monotonic() >= self._hung_at:
                self._end_hung()

    def _end_hung(self) -> None:
        self._life.hung, self._hung_at = True, float("inf")
        for number in self._begun.values():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGABRT)

    def _pause(self) -> float | None:
        """Return the time until the kill; None if there is none to come."""
        waiting = self.killed_at is None and self.victims and len(self._processes) == self._life.run.ranks
        return max(0.0, self.began_at + self._instant - time.monotonic()) if waiting else None

    def _kill(self) -> None:
        for rank in self.victims:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank], signal.SIGKILL)
        self.killed_at = time.monotonic()

    def _take_down(self, rank: int, what: str, *values: Any) -> None:
        life = self._life
        if what == "begun":
            [self._begun[rank]] = values
        elif what == "from":
            life.began_at, self._processes[rank] = values
            self.began_at = time.monotonic()
        elif what == "loss":
            life.losses[rank, *values[0]] = values[1]
        elif what == "step":
            life.reached = max(life.reached, *values)
        elif what == "calls":
            [life.calls[rank]] = values
        elif what == "struck":
            [life.struck] = values
        elif what == "end":
            [life.results[rank]] = values
            # All victims have ended already.
            self.victims = [one for one in self.victims if one != rank]


def _live(run: Run, pipes: list[Connection], fault: Fault | None) -> None:
    rank = int(os.environ["RANK"])

    def tell(*words: Any) -> None:
        pipes[rank].send(words)

    torch.set_num_threads(1)
    with open(f"{run.folder}.log", "a") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    tell("begun", os.getpid())
    tell("end", train(run.folder, run.strategy, run.every, run.in_background, tell, fault))
