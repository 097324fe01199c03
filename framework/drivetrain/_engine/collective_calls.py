"""Checks that a collective call in user code is made on every rank, before the call can hang."""

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

_ARRIVAL_TIMEOUT = timedelta(seconds=30)
_FIRST_PROGRESS_CHECK = 0.01  # seconds to wait before the progress of the other ranks is read
_MAX_PROGRESS_INTERVAL = 1.0  # the most seconds between two readings of the other ranks' progress
_FAILURE_CHECK_INTERVAL = 1.0  # seconds between two checks whether a rank has failed
_MIN_SLEEP = 0.0001  # the least seconds between two checks whether all ranks have arrived
_STACK_DEPTH = 16  # the number of innermost frames that distinguish two call sites
_MAX_CALL_SITES = 10_000  # the number of call sites and code objects that are remembered
_CAUTIOUS_CALLS = 16  # the number of calls at which to wait after a call at which not all ranks waited

_WHY = "a collective method must be called by every rank, in the same order."
_FIX = "look for a call under `if trainer.is_global_zero:`, and move the call out of the condition."


class CollectiveCalls:
    """Verifies that all ranks make the same collective calls. A call under ``if is_global_zero:`` raises an error.

    Each rank counts its calls. In the store it publishes the number of its last call, the call's kind and the call's
    position in the run. A rank that reaches a call site for the first time waits there until the other ranks have
    published the same call. At a known call site a rank does not wait. Ranks may differ in which sites are new, for
    instance with code that is generated or compiled on each rank. If a rank waited at a call and another rank did not,
    the rank that waited also waits at its next `_CAUTIOUS_CALLS` calls. This detects a call that only one rank made and
    that was paired with the next call of the other ranks.
    """

    def __init__(self) -> None:
        self._call_sites = _CallSites()
        self._control: ControlPlane | None = None
        self._number = 0
        self._cautious_calls_left = 0

    def __reduce__(self) -> Any:
        return CollectiveCalls, ()  # all call sites are new in another process

    def check(self, control: ControlPlane, kind: str, position: Callable[[], str], every_time: bool = False) -> None:
        """Wait for the other ranks to reach the same call.

        Args:
            control: connects the ranks.
            kind: the kind of call, such as "all_gather".
            position: returns the position in the run, equal on every rank that makes this call.
            every_time: whether to wait at a known call site too.

        Raises:
            DistributedError: ranks did not reach the call within 30 s, or reached another call. The error names them.
        """
        if control.world_size == 1:
            return
        if control is not self._control:  # another run has another store
            self._control, self._number, self._cautious_calls_left = control, 0, 0
        self._number += 1
        call = _Call(self._number, f"{kind} ({position()})")
        store = control.store
        assert store is not None
        store.set(f"calls/{control.rank}", f"{call.number} {call.text}")
        if self._call_sites.is_new(sys._getframe(1)) or every_time or self._cautious_calls_left:
            all_waited = _wait_for_ranks(control, store, call)
            self._cautious_calls_left = max(0, self._cautious_calls_left - 1) if all_waited else _CAUTIOUS_CALLS

    def gather(self, strategy: Strategy, data: Any, sync_grads: bool) -> Any:
        """Gather every tensor and number of a nested collection. Shape (*S) becomes (W, *S) for world size W."""

        def gathered(value: Any) -> Any:
            return strategy.all_gather(value, sync_grads) if isinstance(value, torch.Tensor) else value

        return map_tensors(_as_tensors(data, strategy.device), gathered)


class _CallSites:
    """The call sites from which this process has made collective calls.

    A call site is a stack of bytecode offsets in code objects. File names and line numbers do not suffice:
    generated code may share or lack them. Functions with equal code count as one function.
    """

    def __init__(self) -> None:
        self._code_numbers: dict[CodeType, int] = {}
        self._by_identity: dict[int, tuple[CodeType, int]] = {}  # a cache: hashing a code object is slow
        self._seen: set[tuple[int, ...]] = set()

    def is_new(self, frame: FrameType | None) -> bool:
        """Record the stack of ``frame`` as a call site; return whether no earlier call came from it."""
        stack: list[int] = []
        for _ in range(_STACK_DEPTH):
            if frame is None:
                break
            stack += (self._number_of(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        call_site = tuple(stack)
        if call_site in self._seen:
            return False
        if len(self._seen) + len(self._by_identity) > _MAX_CALL_SITES:
            for cache in (self._code_numbers, self._by_identity, self._seen):  # forgets all call sites, to bound memory
                cache.clear()
        else:
            self._seen.add(call_site)
        return True

    def _number_of(self, code: CodeType) -> int:
        known = self._by_identity.get(id(code))
        if known is None:  # the entry keeps the code object alive, so that no other object gets its id
            known = self._by_identity[id(code)] = code, self._code_numbers.setdefault(code, len(self._code_numbers))
        return known[1]


class _Call(NamedTuple):
    """A collective call.

    Attributes:
        number: the number of the call in the run.
        text: the kind and the position of the call, equal on every rank.
    """

    number: int
    text: str


def _wait_for_ranks(control: ControlPlane, store: Store, call: _Call) -> bool:
    """Wait until every rank has reached ``call``; return whether all ranks waited there."""
    key = f"calls/{call.number}/{call.text}"
    if store.add(f"{key}/arrived", 1) == control.world_size:
        store.set(f"{key}/all", "")
        return True
    begun = time.monotonic()
    end = begun + _ARRIVAL_TIMEOUT.total_seconds()
    next_progress_check, next_failure_check = begun + _FIRST_PROGRESS_CHECK, begun + _FAILURE_CHECK_INTERVAL
    while not store.check([f"{key}/all"]):
        waited = time.monotonic() - begun
        time.sleep(min(max(waited / 10, _MIN_SLEEP), _FIRST_PROGRESS_CHECK))
        if time.monotonic() < next_progress_check:
            continue
        absent = _ranks_behind(control, store, call)
        if not absent:
            return bool(store.check([f"{key}/all"]))  # False if other ranks knew the call site and did not wait
        next_progress_check = time.monotonic() + min(max(waited, _FIRST_PROGRESS_CHECK), _MAX_PROGRESS_INTERVAL)
        if time.monotonic() > next_failure_check:
            next_failure_check += _FAILURE_CHECK_INTERVAL
            failure = control.first_failure()
            if failure is not None:
                raise RankFailedError(failure)
        if time.monotonic() > end:
            stacks = control.collect_stacks(absent, late=True)
            waiting = f"Rank {control.rank} reached {call.text} at {_calling_line()} and waited {waited:.0f} s"
            raise absent_error(f"{waiting} for rank(s) {absent}.", _WHY, _FIX, stacks, control.records())
    return True


def _ranks_behind(control: ControlPlane, store: Store, call: _Call) -> list[int]:
    """Return the ranks that have made fewer calls than ``call.number``.

    Raises:
        DistributedError: some ranks made another call with this number.
    """
    reached: list[str | None] = []
    for rank in range(control.world_size):
        published = store.get(f"calls/{rank}").decode() if store.check([f"calls/{rank}"]) else "0 "
        number, _, text = published.partition(" ")
        reached.append(None if int(number) < call.number else text if int(number) == call.number else call.text)
    ranks_by_call = spread(reached)
    absent = ranks_by_call.pop(None, [])
    if len(ranks_by_call) > 1:
        calls = "; ".join(f"rank(s) {ranks} reached {text}" for text, ranks in ranks_by_call.items())
        raise DistributedError(
            f"The ranks made different collective calls: {calls}. Rank {control.rank} is at {_calling_line()}.",
            _WHY,
            _FIX,
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
    """Return "file:line" of the innermost frame outside the framework, for a message."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("drivetrain."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
