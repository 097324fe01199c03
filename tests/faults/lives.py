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
from striking import ANY_INSTANT, Fault

from drivetrain.checkpoint import load, verify
from drivetrain.environments import Placement
from drivetrain.launchers import FunctionLauncher

_HUNG = 100.0  # seconds after which remaining ranks write their stacks to the run's log and are ended
_GRACE = 0.5  # seconds for ranks that wait for one that was killed from outside, until the launcher ends them


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

    def _names(self, prefix: str) -> set[str]:
        return {name for name in os.listdir(self.saves) if name.startswith(prefix)} if self.saves.exists() else set()

    def leftovers(self) -> set[str]:
        """Return remains of interrupted saves and removals."""
        return self._names(".")

    def checkpoints(self) -> set[str]:
        return self._names("epoch=")

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
    calls: dict[int, dict[str, int]] = field(default_factory=dict)  # of each place that can be struck, by rank
    struck: float | None = None  # when the fault struck, by the clock that all processes share
    waited: float = 0.0  # seconds from the fault to the end of every process
    seconds: float = 0.0  # from the first step to the end of every process
    error: BaseException | None = None
    hung: bool = False  # whether ranks had to be ended because nothing else did

    @property
    def ended(self) -> bool:
        return len(self.results) == self.run.ranks

    def live(self, fault: Fault) -> Life:
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(self.run.ranks)]
        watcher = _Watcher(self, [ours for ours, _ in pipes], fault)
        watcher.start()
        whole = Placement.on_one_node(0, self.run.ranks)
        launcher = FunctionLauncher("fork", grace=_GRACE) if fault.kind == ANY_INSTANT else FunctionLauncher("fork")
        try:
            launcher.call_all(whole, _live, self.run, [theirs for _, theirs in pipes], fault)
        except BaseException as error:
            self.error = error
        finally:
            over = time.monotonic()
            for _, theirs in pipes:
                theirs.close()
            watcher.join()
        self.seconds = over - watcher.began_at
        self.waited = 0.0 if self.struck is None else over - self.struck
        return self


class _Watcher(threading.Thread):
    """Records the events of the ranks, kills victims at the fault's instant, and ends ranks that hang."""

    def __init__(self, life: Life, pipes: list[Connection], fault: Fault) -> None:
        super().__init__(daemon=True)
        self.began_at = time.monotonic()
        self._life = life
        self._pipes = pipes
        self._instant = fault.nth / 1000
        self._victims = {fault.rank} if fault.rank >= 0 else {*range(life.run.ranks)}
        if fault.kind != ANY_INSTANT:
            self._victims = set()
        self._begun: dict[int, int] = {}
        self._stepping: set[int] = set()
        self._hung_at = time.monotonic() + _HUNG

    def run(self) -> None:
        pipes: list[Any] = list(self._pipes)
        while pipes:
            until_hung = max(0.0, self._hung_at - time.monotonic())
            ready: list[Any] = wait(pipes, min(self._pause(), until_hung))
            for pipe in ready:
                try:
                    self._take_down(self._pipes.index(pipe), *pipe.recv())
                except (EOFError, OSError):
                    pipes.remove(pipe)
            if self._pause() == 0:
                self._life.struck = time.monotonic()
                self._end(self._victims, signal.SIGKILL)
            if time.monotonic() >= self._hung_at:
                self._life.hung, self._hung_at = True, time.monotonic() + 10 * _HUNG
                self._end(set(self._begun), signal.SIGABRT)

    def _end(self, ranks: set[int], number: signal.Signals) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._begun[rank], number)

    def _pause(self) -> float:
        """Return the time until the kill; infinity if there is none to come."""
        waiting = self._life.struck is None and self._victims and len(self._stepping) == self._life.run.ranks
        return max(0.0, self.began_at + self._instant - time.monotonic()) if waiting else float("inf")

    def _take_down(self, rank: int, what: str, *values: Any) -> None:
        life = self._life
        if what == "begun":
            [self._begun[rank]] = values
        elif what == "from":
            [life.began_at] = values
            self._stepping.add(rank)
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
            self._victims.discard(rank)  # it has ended already


def _live(run: Run, pipes: list[Connection], fault: Fault) -> None:
    rank = int(os.environ["RANK"])

    def tell(*words: Any) -> None:
        pipes[rank].send(words)

    torch.set_num_threads(1)
    with open(f"{run.folder}.log", "a") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    tell("begun", os.getpid())
    tell("end", train(run.folder, run.strategy, run.every, run.in_background, tell, fault))
