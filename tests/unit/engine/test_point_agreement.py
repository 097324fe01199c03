"""Ranks agree on the point at which they end, whatever the order in which their threads run (Q-06, B-19); what must be
the same on all ranks is compared, and each difference is named (A-10).
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

# Private: the lines of the protocol are what is interleaved; no run has so many differences, or a missing name.
from drivetrain._distributed.control_plane import LocalControl, digest_of, refuse_differences
from drivetrain._loops import stopping
from drivetrain._loops.stopping import StopRequest
from drivetrain.errors import CheckpointError

RANKS = 3
SIGNAL = 15
MOST_TURNS = 500_000  # a schedule needs a few thousand; ranks that wait for each other for ever would use all


class Schedule:
    """Lets one thread run at a time, and draws before each line of the protocol which thread runs next.

    Some threads are drawn much more often than others.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._weights: dict[str, float] = {}
        self._turn: dict[str, threading.Semaphore] = {}
        self._conditions: dict[str, Callable[[], bool]] = {}
        self._turns = 0
        self._errors: list[BaseException] = []

    def run(self, functions: dict[str, Callable[[], None]]) -> None:
        self._weights = {name: self._draw.choice((1.0, 0.5, 0.1)) for name in functions}
        self._turn = {name: threading.Semaphore(0) for name in functions}
        threads = [threading.Thread(target=self._call, args=item) for item in functions.items()]
        for thread in threads:
            thread.start()
        self._turn[self._next()].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def switch(self, name: str) -> None:
        """Let the drawn thread run, and wait for the next turn of this thread, ``name``."""
        self._turns += 1
        if self._turns > MOST_TURNS:
            raise RuntimeError("the ranks wait for each other")
        drawn = self._next()
        if drawn != name:
            self._turn[drawn].release()
            self._turn[name].acquire()
        if self._errors:
            raise self._errors[0]

    def wait_until(self, condition: Callable[[], bool], name: str) -> None:
        """Let other threads run until the condition holds."""
        if not condition():
            self._conditions[name] = condition
            self.switch(name)
            self._conditions.pop(name, None)

    def _next(self) -> str:
        ready = [name for name in self._weights if self._errors or self._conditions.get(name, lambda: True)()]
        return self._draw.choices(ready, [self._weights[name] for name in ready])[0]

    def _call(self, name: str, function: Callable[[], None]) -> None:
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if frame.f_code.co_filename != stopping.__file__:
                return None
            if event == "line":
                self.switch(name)
            return trace

        self._turn[name].acquire()
        try:
            sys.settrace(trace)
            if not self._errors:
                function()
        except BaseException as error:
            self._errors.append(error)
        finally:
            sys.settrace(None)
            del self._weights[name]
            if self._weights:
                self._turn[self._next()].release()


class SimulatedRank(LocalControl):
    """The control plane of one rank, whose two threads a `Schedule` runs."""

    def __init__(self, rank: int, store: Any, schedule: Schedule, arrivals: Counter[Any]) -> None:
        self.rank = rank
        self.world_size = RANKS
        self.store = store
        self._schedule = schedule
        self._arrivals = arrivals
        self._agreements = 0
        self.poll: Callable[[Any], None] = lambda store: None

    def watch(self, poll: Callable[[Any], None]) -> None:
        self.poll = poll

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self._schedule.wait_until(condition, f"main {self.rank}")

    def wait_for(self, key: str, purpose: str) -> None:
        store = self.store
        assert store is not None
        self.wait_until(lambda: store.check([f"{key}/done"]))

    def count_flags(self, purpose: str, *flags: bool, timeout: Any = None) -> tuple[int, ...]:
        self._agreements += 1
        number = self._agreements
        self._arrivals.update((number, flag) for flag, raised in enumerate(flags) if raised)
        self._arrivals[number] += 1
        self.wait_until(lambda: self._arrivals[number] == RANKS)
        return tuple(self._arrivals[number, flag] for flag in range(len(flags)))


class Ranks:
    """Simulated ranks, each with a main thread that passes points and a watchdog thread that polls.

    Args:
        draw: draws the schedule, and which ranks get a signal.
        loop: ``loop(ranks, rank)`` runs in each main thread.
        fewest: the smallest number of ranks that get a signal.
    """

    def __init__(self, draw: random.Random, loop: Callable[[Ranks, int], None], fewest: int = 1) -> None:
        store, arrivals, schedule = dist.HashStore(), Counter[Any](), Schedule(draw)  # type: ignore[attr-defined]
        self.controls = [SimulatedRank(rank, store, schedule, arrivals) for rank in range(RANKS)]
        self.stops = [StopRequest(control, None, None, None) for control in self.controls]
        signalled = draw.sample(range(RANKS), draw.randrange(fewest, 3))
        polls_before_signal = {rank: draw.choice((0, 2, 8, 30)) for rank in signalled}
        self.passed = [0] * RANKS
        self.met = Counter[int]()  # the number of ranks that have reached each collective of the user
        self.finished = 0
        self.latest = 0  # the largest number of points that a rank had passed when the last rank had answered

        def main(rank: int) -> None:
            loop(self, rank)
            self.finished += 1

        def watchdog(rank: int) -> None:
            polls = 0
            while self.finished < RANKS:
                if polls == polls_before_signal.get(rank):
                    self.stops[rank].leave_after(SIGNAL)
                self.controls[rank].poll(store)
                polls += 1
                if not self.latest and store.check(["leave/answers/done"]):
                    self.latest = max(self.passed)
                schedule.switch(f"watchdog {rank}")

        threads = (("main", main), ("watchdog", watchdog))
        schedule.run({f"{name} {rank}": partial(thread, rank) for rank in range(RANKS) for name, thread in threads})

    def meet(self, rank: int, number: int) -> None:
        """Wait for the other ranks in a collective of the user."""
        self.met[number] += 1
        self.controls[rank].wait_until(lambda: self.met[number] == RANKS)


@pytest.mark.parametrize("meets", [True, False], ids=["with collectives", "without collectives"])
def test_all_ranks_end_at_the_same_point_in_any_order_of_their_threads(meets: bool) -> None:  # Q-06, B-19
    """With collectives, no rank is more than one point ahead of the others, and a rank that leaves blocks them."""

    def loop(ranks: Ranks, rank: int) -> None:
        stop = ranks.stops[rank]
        for step in itertools.count(1):
            if wishes.get(rank) == step:
                stop.ask("a test")
            if stop.after_window(step, 0):
                return
            ranks.passed[rank] += 1
            if meets:
                ranks.controls[rank].wait_until(lambda: min(ranks.passed) >= ranks.passed[rank])

    reasons = Counter[int]()
    for seed in range(40):
        draw = random.Random(seed)
        wishes = {rank: draw.randrange(1, 20) for rank in draw.sample(range(RANKS), draw.randrange(3))}
        ranks = Ranks(draw, loop, fewest=0 if wishes else 1)
        assert len(set(ranks.passed)) == 1, (seed, ranks.passed)
        (leaving,) = {stop.preempted for stop in ranks.stops}
        reasons[leaving] += 1
        if leaving:
            # Once all ranks have answered, none begins another micro-batch.
            assert ranks.passed[0] <= ranks.latest + 1, seed
    assert len(reasons) == 2


def test_ranks_of_different_lengths_leave_together() -> None:
    """Each rank passes its own number of points in a first loader, and all meet in each micro-batch of a second one."""

    def loop(ranks: Ranks, rank: int) -> None:
        stop = ranks.stops[rank]
        for number in range(2):
            for batch in range(lengths[number][rank]):
                if stop.exits_at_point(apart=True):
                    stop.release_ranks_behind(lambda: None)
                    break
                ranks.passed[rank] += 1
                if number:
                    ranks.meet(rank, batch)
            stop.agree_when_all_arrive(f"loader {number}", equal_counts=False, wait_for_device=lambda: None)
            if stop.is_preempted():
                left[rank] = number
                return
        left[rank] = 2  # the data has ended, and with it the evaluation

    outcomes = Counter[int]()
    for seed in range(60):
        draw = random.Random(seed)
        left: dict[int, int] = {}
        lengths = [[draw.choice((0, 1, 3, 12)) for _ in range(RANKS)], [12] * RANKS]
        Ranks(draw, loop)
        assert len(set(left.values())) == 1, (seed, lengths, left)
        outcomes[left[0]] += 1
    assert len(outcomes) == 3  # the schedules are not all alike


def test_a_rank_that_is_behind_leaves_unless_a_collective_awaits_it() -> None:
    """The ranks meet in a collective of the user in every tenth micro-batch, or in none."""

    def loop(ranks: Ranks, rank: int) -> None:
        stop = ranks.stops[rank]
        while not stop.exits_at_point(apart=True):
            ranks.passed[rank] += 1
            number = ranks.passed[rank] // 10
            if ranks.passed[rank] % 10 == 0 and meets:
                ranks.meet(rank, number)
        stop.release_ranks_behind(lambda: None)
        stop.agree_when_all_arrive("the end", equal_counts=True, wait_for_device=lambda: None)

    spread = 0
    for seed in range(40):
        meets = seed % 2 == 0
        ranks = Ranks(random.Random(seed), loop)
        assert set(ranks.met.values()) <= {RANKS}, (seed, ranks.passed, ranks.met)
        spread = max(spread, max(ranks.passed) - min(ranks.passed))
    assert spread > 3


def test_each_difference_is_named_with_its_values_and_their_ranks() -> None:
    ranks: list[dict[str, Any]] = [{"a": 1, "b": "x", "c": None}, {"a": 1, "b": "y", "c": None}, {"a": 1, "b": "x"}]
    with pytest.raises(CheckpointError) as found:
        refuse_differences(ranks, "the reason.", "the fix.", CheckpointError)
    error = found.value
    differences = 'b: "x" on rank(s) [0, 2]; "y" on rank(s) [1] | c: null on rank(s) [0, 1]; missing on rank(s) [2]'
    assert error.what == f"The ranks do not agree on {differences}."
    assert (error.why, error.fix) == ("the reason.", "the fix.")


def test_equal_values_raise_nothing() -> None:
    refuse_differences([{"a": (1, 2), "b": float("nan")}, {"b": float("nan"), "a": [1, 2]}], "", "")
    assert digest_of({"a": (1, 2), "b": 3}) == digest_of({"b": 3, "a": [1, 2]})
    assert digest_of(["a", "b"]) != digest_of(["b", "a"])
