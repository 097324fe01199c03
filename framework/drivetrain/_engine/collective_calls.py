"""Collective calls from user code, looked at before they can hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_plane import ControlPlane, absent_error, spread
from drivetrain._distributed.failure import RankFailedError
from drivetrain._runtime.transfer import map_tensors
from drivetrain.errors import DistributedError
from drivetrain.strategies.strategy import Strategy

_ARRIVE = timedelta(seconds=30)
_LOOK = 0.01  # seconds after which a rank looks how far the others are, if not all of them wait as well
_LONGEST_LOOK = 1.0
_LOOK_FOR_FAILURES = 1.0
_SHORTEST_PAUSE = 0.0001
_DEPTH = 16  # calls on the stack by which two places are told apart
_MOST = 10_000  # places that are remembered
_WARY = 16  # calls

_WHY = "what is collective must be called by every rank, in the same order."
_FIX = "look for a call under `if trainer.is_global_zero:` and move it out."


class CollectiveCalls:
    """Makes sure that a collective call comes on every rank: one under ``if is_global_zero:`` is refused.

    Calls are counted, and each rank leaves word in the store of how many it has come to, of what kind the last is, and
    where the run was then. One that comes through a place in its code for the first time waits there until the others
    have left the same word; one that has been there before does not wait. Which places are new need not be alike on all
    ranks: their code may have been generated, each its own, or compiled at other times. Where it was not, a rank that
    waited waits at its next calls too: a call that it made alone, and that met the next one of the others, shows there.
    """

    def __init__(self) -> None:
        self._places = _Places()
        self._control: ControlPlane | None = None
        self._number = 0
        self._wary = 0

    def __reduce__(self) -> Any:
        return CollectiveCalls, ()  # in another process all places are new

    def check(self, control: ControlPlane, what: str, where: Callable[[], str], every_time: bool = False) -> None:
        """Wait for the other ranks to come to the same call.

        Args:
            control: the way to them.
            what: the kind of call.
            where: tells where the run is, alike on every rank that makes this call.
            every_time: wait at a place that is known, too.

        Raises:
            DistributedError: some did not, within half a minute, or came to another call; names them.
        """
        if control.world_size == 1:
            return
        if control is not self._control:  # another run, with a store of its own
            self._control, self._number, self._wary = control, 0, 0
        self._number += 1
        call = _Call(self._number, f"{what} ({where()})")
        store = control.store
        assert store is not None
        store.set(f"calls/{control.rank}", f"{call.number} {call.text}")  # waits for no answer
        if self._places.is_new(sys._getframe(1)) or every_time or self._wary:
            self._wary = max(0, self._wary - 1) if _meet(control, store, call) else _WARY

    def gather(self, strategy: Strategy, data: Any, sync_grads: bool) -> Any:
        """Gather every tensor and number of a nested collection; each of shape (*S) becomes (W, *S)."""

        def gathered(value: Any) -> Any:
            return strategy.all_gather(value, sync_grads) if isinstance(value, torch.Tensor) else value

        return map_tensors(_as_tensors(data, strategy.device), gathered)


class _Places:
    """The places in the code that this process has called from.

    A place is an instruction of a function, called from an instruction of another, and so on: no name of a function, a
    file or a line is asked, which generated code shares, or has none of. Two functions of one text, made one after the
    other, are the same one.
    """

    def __init__(self) -> None:
        self._functions: dict[CodeType, int] = {}
        self._known: dict[int, tuple[CodeType, int]] = {}  # the same by identity, for looking at a text takes long
        self._seen: set[tuple[int, ...]] = set()

    def is_new(self, frame: FrameType | None) -> bool:
        """Whether nobody has come from ``frame`` before, as it stands."""
        place: list[int] = []
        for _ in range(_DEPTH):
            if frame is None:
                break
            place += (self._number_of(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        found = tuple(place)
        if found in self._seen:
            return False
        if len(self._seen) + len(self._known) > _MOST:
            for kept in (self._functions, self._known, self._seen):  # what is new again is waited at once more
                kept.clear()
        else:
            self._seen.add(found)
        return True

    def _number_of(self, code: CodeType) -> int:
        known = self._known.get(id(code))
        if known is None:  # it is kept, so that no other gets its identity
            known = self._known[id(code)] = code, self._functions.setdefault(code, len(self._functions))
        return known[1]


class _Call(NamedTuple):
    """A collective call: which one of the run, and what and where it is, alike on every rank."""

    number: int
    text: str


def _meet(control: ControlPlane, store: Store, call: _Call) -> bool:
    """Wait until every rank has come to ``call``; returns whether all of them waited there."""
    key = f"calls/{call.number}/{call.text}"
    if store.add(f"{key}/came", 1) == control.world_size:
        store.set(f"{key}/all", "")
        return True
    begun = time.monotonic()
    end, look, hear = begun + _ARRIVE.total_seconds(), begun + _LOOK, begun + _LOOK_FOR_FAILURES
    while not store.check([f"{key}/all"]):
        waited = time.monotonic() - begun
        time.sleep(min(max(waited / 10, _SHORTEST_PAUSE), _LOOK))
        if time.monotonic() < look:
            continue
        absent = _absent(control, store, call)
        if not absent:
            return bool(store.check([f"{key}/all"]))  # else the others knew the place, and are in the call
        look = time.monotonic() + min(max(waited, _LOOK), _LONGEST_LOOK)
        if time.monotonic() > hear:
            hear += _LOOK_FOR_FAILURES
            failure = control.first_failure()
            if failure is not None:
                raise RankFailedError(failure)
        if time.monotonic() > end:
            where = control.collect_stacks(absent, late=True)
            told = f"Rank {control.rank} came to {call.text} at {_calling_line()} and waited {waited:.0f} s"
            raise absent_error(f"{told} for rank(s) {absent}.", _WHY, _FIX, where, control.records())
    return True


def _absent(control: ControlPlane, store: Store, call: _Call) -> list[int]:
    """The ranks that have not made as many calls.

    Raises:
        DistributedError: some came to another one.
    """
    came: list[str | None] = []
    for rank in range(control.world_size):
        word = store.get(f"calls/{rank}").decode() if store.check([f"calls/{rank}"]) else "0 "
        number, _, text = word.partition(" ")
        came.append(None if int(number) < call.number else text if int(number) == call.number else call.text)
    ways = spread(came)
    absent = ways.pop(None, [])
    if len(ways) > 1:
        told = "; ".join(f"rank(s) {ranks} came to {text}" for text, ranks in ways.items())
        raise DistributedError(
            f"The ranks went different ways: {told}. Rank {control.rank} is at {_calling_line()}.", _WHY, _FIX
        )
    return absent


def _as_tensors(data: Any, device: torch.device) -> Any:
    if isinstance(data, bool | int | float):
        return torch.tensor(data, device=device)
    if isinstance(data, dict):
        return {key: _as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_as_tensors(value, device) for value in data)
    return data


def _calling_line() -> str:
    """For a message: the line of user code that a call came from, the first frame that is not the framework's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("drivetrain."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
