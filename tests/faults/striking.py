"""Faults that strike a rank at the nth call of a given place of a run."""

from __future__ import annotations

import functools
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from drivetrain import Callback
from drivetrain._engine.checkpoints.checkpoint_manager import CheckpointManager
from drivetrain.launchers import current_processes

STEP_TIMEOUT = timedelta(seconds=3)
"""How long the ranks of a run with a stall wait for each other, once they have made a step."""

ANY_INSTANT = "killed at any instant"
"""A fault from outside: its ``nth`` are milliseconds after the first step, and its rank is -1 for all ranks."""

_NOT_CALLED = ("on_exception", "on_test", "on_predict")
HOOKS = [
    name
    for name in vars(Callback)
    if name.startswith(("on_", "setup", "teardown")) and not name.startswith(_NOT_CALLED)
]
WHERE_RESUMED = ["load_state_dict", "on_load_checkpoint"]
OTHERS = ["state_dict", "training_step", "validation_step", "configure_optimizers", "reading"]
_WRITING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}


class Struck(Exception): ...


@dataclass(frozen=True)
class Fault:
    """A fault of one of `KINDS`, at the nth call of a hook or step, or of an operation on files: "writing"."""

    kind: str = "none"
    rank: int = 0
    place: str = "training_step"
    nth: int = 1


class Striker:
    """Injects a fault into a run. Calls during a rehearsal of saves do not count, since it ignores errors of hooks."""

    def __init__(self, fault: Fault, tell: Callable[..., None], folder: Path) -> None:
        self._fault = fault
        self._tell = tell
        self._rank = int(os.environ["RANK"])
        self.calls: Counter[str] = Counter()
        self._rehearses = False
        self._watch_rehearsals()
        _inherited.update(_sockets())
        if fault.kind == "none" or fault.place == "writing":
            self._folder = str(folder)
            sys.addaudithook(self._on_event)
        if fault.kind == "refused" and self._rank == fault.rank:
            self._strike()

    def at(self, place: str) -> None:
        if self._rehearses:
            return
        self.calls[place] += 1
        fault = self._fault
        if (fault.place, fault.nth, fault.rank) == (place, self.calls[place], self._rank):
            self._strike()

    def _watch_rehearsals(self) -> None:
        rehearse = CheckpointManager._rehearse

        def run(checkpoints: CheckpointManager, saves_resumable: bool) -> None:
            self._rehearses = True
            try:
                rehearse(checkpoints, saves_resumable)
            finally:
                self._rehearses = False

        CheckpointManager._rehearse = run  # type: ignore[method-assign,assignment]

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _WRITING and str(arguments[0]).startswith(self._folder):
            self.at("writing")

    def settings(self) -> dict[str, Any]:
        return {"step_timeout": STEP_TIMEOUT} if self._fault.kind == "stalls" else {}

    def callback(self) -> Callback:
        callback = Callback()
        for name in [*HOOKS, "state_dict", "load_state_dict"]:
            setattr(callback, name, self._then(name, getattr(callback, name)))
        return callback

    def module(self, module: Any) -> Any:
        module.validation_step = lambda batch, batch_idx: None
        for name in ("training_step", "validation_step", "configure_optimizers"):
            setattr(module, name, self._then(name, getattr(module, name)))
        return module

    def data(self, data: Any) -> Any:
        plain = type(data)

        class Read(plain):  # type: ignore[valid-type,misc]
            def __getitem__(this, index: int) -> Any:
                self.at("reading")
                return super().__getitem__(index)

        return Read()

    def _then(self, place: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)  # the engine inspects a step's signature
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.at(place)
            return plain(*args, **kwargs)

        return hook

    def _strike(self) -> None:
        if self._fault.kind != "none":
            self._tell("struck", time.monotonic())
            KINDS[self._fault.kind](self._fault)


_inherited: dict[str, int] = {}
_held: list[socket.socket] = []


def _raise(fault: Fault) -> None:
    raise Struck(f"in {fault.place} for the {fault.nth}. time")


def _stall(fault: Fault) -> None:
    time.sleep(1000)


def _fill_the_disk(fault: Fault) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def _sockets() -> dict[str, int]:
    """Return the sockets of this process, by identity, with their descriptors."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}")] = int(name)
    return {link: number for link, number in found.items() if link.startswith("socket:")}


def _cut_off(fault: Fault) -> None:
    """Close every connection that this process has opened; inherited ones belong to its parent."""
    for link, number in _sockets().items():
        if link not in _inherited:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _refuse(fault: Fault) -> None:
    """Redirect connections to the other ranks to a port on which nothing listens."""
    world = current_processes()
    assert world is not None
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    _held.append(free)  # kept bound, so that no other process gets it
    world.placement = replace(world.placement, port=free.getsockname()[1])


KINDS: dict[str, Callable[[Fault], object]] = {
    "raises": _raise,
    "killed": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda fault: sys.exit(7),
    "leaves": lambda fault: os._exit(8),
    "stalls": _stall,
    "slow": lambda fault: time.sleep(0.1 + 0.05 * fault.nth),
    "full disk": _fill_the_disk,
    "cut off": _cut_off,
    "refused": _refuse,
}
