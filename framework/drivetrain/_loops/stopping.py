"""Requests to end a run, on which all ranks agree so that they stop after the same window."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_plane import ControlPlane

_TIME_IS_UP = 2
"""The reason code of a stop by ``max_time``, after which the run is saved to be resumed. Other stops have code 1."""


class AgreedStep:
    """Agrees on a point at which all ranks act.

    All ranks count the same points, such as the ends of micro-batches. Two threads of a rank take part: the *main
    thread* passes the points, and the *watchdog thread* polls the store, also while the main thread is in a long
    micro-batch or waits in a collective.

    Once a rank knows of a request, it first *holds* its main thread, which from then on concludes the agreement at the
    next point, before it passes that point. Then the rank answers with the number of that point. The last rank to
    answer publishes the largest answer: the agreed point.

    The agreed point is never behind a rank. A rank that answers n is held before it reads that its main thread has
    reached point n - 1, so the main thread may have seen the hold at point n - 1 already, and otherwise sees it at
    point n. At either point it learns the agreed point, which is at least n, before it goes on. Holding cannot block
    the ranks for ever either: the main threads that are held wait only for answers, and watchdog threads give them,
    whatever their main threads wait for.

    Args:
        control: the control plane, whose store is used.
        name: the prefix of the agreement's keys in the store.
        hold: holds the main thread, and returns the next point at which it is held. Called in either thread.
    """

    def __init__(self, control: ControlPlane, name: str, hold: Callable[[], int]) -> None:
        self._control = control
        self._name = name
        self._hold = hold
        self.requested = False
        """Whether this rank knows of a request and answers it. Set in either thread."""
        self.point: float = math.inf
        """The agreed point; infinite until the main thread has learnt it."""
        self.reason = 0
        """The reason of the first request, the same on all ranks; 0 until the main thread has learnt it."""

    def request(self, reason: int, store: Store) -> None:
        """Request an action as soon as possible, for a ``reason`` other than 0. Only the first request counts.

        Args:
            reason: why the ranks are to act.
            store: the calling thread's connection to the store.
        """
        if not self.requested:
            store.compare_set(f"{self._name}/reason", "", str(reason))
            self._answer(store)

    def poll(self, store: Store) -> None:
        """Answer a request of any rank. Called in the watchdog thread."""
        if not self.requested and store.check([f"{self._name}/reason"]):
            self._answer(store)

    def conclude(self) -> None:
        """Wait until all ranks have answered, if there is a request. Called in the main thread, at a point."""
        if self.requested and self.point == math.inf:
            self._control.wait_for(f"{self._name}/answers", f"the agreement on a point at which to {self._name}")
            store = self._control.store
            assert store is not None
            self.point = int(store.get(f"{self._name}/answers/done"))
            self.reason = int(store.get(f"{self._name}/reason"))

    def publish_reason(self, reason: int) -> bool:
        """Publish this rank's reason, if any, before ranks with a request are counted; return whether this rank counts.

        A rank counts too if it knows of another rank's request, on whose point the ranks have not agreed yet.
        """
        store = self._control.store
        if reason and store is not None:
            store.compare_set(f"{self._name}/reason", "", str(reason))
        elif reason:
            self.reason = reason
        return reason > 0 or self.requested

    def act_on_requests(self, requesting: int) -> None:
        """Act at the current point if ranks that have all arrived there, and called `publish_reason`, have a request.

        Args:
            requesting: the number of ranks with a request.
        """
        store = self._control.store
        if requesting:
            self.point = 0
            if store is not None:
                self.reason = int(store.get(f"{self._name}/reason"))

    def _answer(self, store: Store) -> None:
        self.requested = True
        answer, key, control = self._hold(), f"{self._name}/answers", self._control
        if store.add(f"{key}/of/{control.rank}", 1) > 1:
            return  # this rank's other thread answers
        store.set(f"{key}/{control.rank}", str(answer))
        if store.add(key, 1) == control.world_size:
            answers = store.multi_get([f"{key}/{rank}" for rank in range(control.world_size)])
            store.set(f"{key}/done", str(max(map(int, answers))))


class StopRequest:
    """Collects the requests of all ranks to end the run, and lets all ranks end the run after the same window.

    There are two kinds of requests. A *stop* ends the run in the ordinary way after a window, but not before
    ``min_steps`` and ``min_epochs``. *Leaving*, on a preemption signal, saves the run and exits. No minimum defers
    leaving, and a run may be left within a long window or a validation.

    The ranks count points instead of optimizer steps, because a window may make no step.

    Args:
        control: the control plane.
        max_time: the time after which a stop is requested; None for no limit.
        min_steps: optimizer steps before which a stop is deferred.
        min_epochs: epochs before which a stop is deferred.
    """

    def __init__(
        self, control: ControlPlane, max_time: timedelta | None, min_steps: int | None, min_epochs: int | None
    ) -> None:
        self._control = control
        self._store = control.store
        self._max_time = max_time
        self._deadline = None if max_time is None else time.monotonic() + max_time.total_seconds()
        self._min_steps = min_steps or 0
        self._min_epochs = min_epochs or 0
        self._stop = AgreedStep(control, "stop", self._hold)
        self._leave = AgreedStep(control, "leave", self._hold)
        self._agreed = False
        self._time_is_up = False  # whether max_time was this rank's first reason to stop
        self._point = 0  # the number of points passed, the same on every rank
        self._held = False  # whether the main thread has to conclude an agreement at the next point
        self._waits = False  # whether the main thread waits for the other ranks, and passes no points until all arrive
        self._exchanges = 0  # the number of calls of `_agree_on_furthest_point`
        self._in_first_window = True  # steps may be compiled in it, so the control plane allows ending time
        self.requested = False
        """Set to request a stop; ``trainer.should_stop``."""
        self._withdrawable: dict[int, str] = {}  # reasons for stops, by the owner's id; the same on all ranks
        self.own_reason: str | None = None
        """The reason of this rank's first request, for the log."""
        self.signal = 0
        """The number of a preemption signal that this process has received; 0 for none."""
        self.counts_points = self._store is not None
        """Whether `exits_at_point` has to be called at each point: on several ranks, or after a signal."""
        self.preempted = 0
        """The number of the signal because of which all ranks leave now; 0 for none."""
        if self._store is not None:
            control.watch(self._poll)

    @property
    def saves_to_resume(self) -> bool:
        """Whether the run ends in order to be resumed later, so that it must be saved."""
        return self.preempted > 0 or (self._time_is_up if self._store is None else self._stop.reason == _TIME_IS_UP)

    def leave_after(self, signal: int) -> None:
        """Request leaving because of a preemption signal. May be called in any thread."""
        self.signal = signal
        self.counts_points = True

    @property
    def is_asked(self) -> bool:
        """Whether a stop was requested, which ``min_steps`` or ``min_epochs`` may still defer."""
        return self.requested or bool(self._withdrawable)

    def ask(self, reason: str | None) -> None:
        """Request a stop, for ``reason``; None withdraws this rank's requests."""
        self.requested = reason is not None
        self.own_reason = None if reason is None else self.own_reason or reason
        if reason is None:
            self._withdrawable.clear()

    def ask_or_withdraw(self, owner: object, reason: str | None) -> None:
        """Request a stop that is obeyed once ``min_steps`` and ``min_epochs`` are reached; None withdraws it.

        All ranks call this method at the same point with the same decision, so no agreement is needed.
        """
        if reason is None:
            self._withdrawable.pop(id(owner), None)
        else:
            self._withdrawable[id(owner)] = reason

    @property
    def reason(self) -> str | None:
        """The reason of the first rank that requested a stop; None without a request. Not collective."""
        if self._store is not None and self._store.check(["stop/because"]):
            return str(self._store.get("stop/because").decode())
        return self.own_reason

    def after_window(self, step: int, epoch: int) -> bool:
        """Return whether the run ends now. Called on every rank after each window, whether or not it made a step.

        Args:
            step: optimizer steps made.
            epoch: epochs completed.
        """
        if self._deadline is not None:
            self._check_deadline()
        if self._store is None:
            self.preempted = self.signal
            if self.requested or self._withdrawable:
                return self.preempted > 0 or self._obeys_request(step, epoch)
            return self.preempted > 0
        if self._in_first_window:
            self._in_first_window = False
            self._control.after_first_step()
        if self.requested and not self._stop.requested:
            self._publish_reason()
            self._stop.request(self._reason_code(), self._store)
        if self.exits_at_point():
            return True
        if self._point >= self._stop.point:
            self.requested = True
        elif not self._withdrawable:
            return False
        return self._obeys_request(step, epoch, apart=self._point < self._stop.point)

    def exits_at_point(self, apart: bool = False) -> bool:
        """Return whether all ranks leave now. Called on every rank at each point.

        Points are the ends of windows, of micro-batches within a window, and of micro-batches of an evaluation.

        Args:
            apart: whether ranks may be many points apart, because no forward or backward is collective. A rank that is
                behind then leaves once another rank has called `release_ranks_behind`, unless it shares a process group
                with only some of the ranks: another rank behind may already wait in a collective of this group.
        """
        if self._store is None:
            self.preempted = self.signal
            return self.preempted > 0
        if self.signal and not self._leave.requested:
            self._leave.request(self.signal, self._store)
        self._point = point = self._point + 1
        if self._held:
            self._conclude()
        if point < self._leave.point and not (apart and self._may_leave_behind()):
            return False
        self.preempted = self._leave.reason
        return True

    def agree(self, purpose: str) -> None:
        """Exchange requests at a point that all ranks reach together. Collective.

        An action that was agreed for a later point is due at once.
        """
        self._check_deadline()  # an epoch may have no complete window
        code = 0 if self._agreed or not self.requested else self._reason_code()
        if code:
            self._publish_reason()
        stops, leaves = self._stop.publish_reason(code), self._leave.publish_reason(self.signal)
        stopping, leaving = self._control.count_flags(purpose, self.requested or stops, leaves)
        if stopping and not self._agreed:
            self._stop.act_on_requests(stopping)
        self._leave.act_on_requests(leaving)
        self.requested = self._agreed = stopping > 0

    def release_ranks_behind(self, wait_for_device: Callable[[], object]) -> None:
        """After a request to leave, let the ranks that are behind leave before they reach the agreed point.

        This rank has left an evaluation, or its data has ended. It has passed all its points without the ranks that are
        behind, so the micro-batches that they skip contain no collective of all ranks. (If one did, the device would
        still wait in it.) They may contain collectives of the ranks behind, see `exits_at_point`.

        Args:
            wait_for_device: waits until the device has done this rank's work.
        """
        if self._held:
            self._conclude()
        if self._store is not None and self._leave.reason:
            wait_for_device()
            self._store.set("leave/reached", "")

    def agree_when_all_arrive(self, purpose: str, *, equal_counts: bool, wait_for_device: Callable[[], object]) -> None:
        """Exchange requests at a point that one rank may reach before the others. Collective.

        A rank that makes a request before it arrives ignores the ranks that wait. It acts at its current point, and
        then arrives too.

        Args:
            purpose: the purpose of the agreement, the same on every rank.
            equal_counts: whether all ranks have passed the same number of points. Otherwise all ranks continue from
                the largest number.
            wait_for_device: as for `release_ranks_behind`.
        """
        self._waits = True
        self.release_ranks_behind(wait_for_device)
        if equal_counts or self._store is None:
            self.agree(purpose)
        else:
            self._point = self._agree_on_furthest_point(purpose)
        self._waits = False

    def _agree_on_furthest_point(self, purpose: str) -> int:
        """Exchange requests and points; return the largest point of all ranks."""
        store, rank = self._store, self._control.rank
        assert store is not None
        number, self._exchanges = self._exchanges, self._exchanges + 1
        store.set(f"points/{number}/{rank}", str(self._point))
        self.agree(purpose)
        if number > 1:  # all ranks have read the points of two exchanges ago
            store.delete_key(f"points/{number - 2}/{rank}")
        keys = [f"points/{number}/{other}" for other in range(self._control.world_size)]
        return max(map(int, store.multi_get(keys)))

    def is_preempted(self) -> bool:
        """Return whether all ranks leave, by the requests that `agree` has exchanged."""
        self.preempted = self._leave.reason
        return self.preempted > 0

    def defer_leaving(self) -> None:
        """Defer leaving to the next point. Called on all ranks."""
        self.preempted = 0

    def after_epoch(self, step: int, epochs: int) -> bool:
        """Return whether the run ends between two epochs, by the requests that `agree` has exchanged."""
        return self.is_preempted() or self._obeys_request(step, epochs)

    def _obeys_request(self, step: int, epochs: int, apart: bool = False) -> bool:
        """Return whether the run ends because of a request, now that ``step`` and ``epochs`` are reached.

        Args:
            step: optimizer steps made.
            epochs: epochs completed.
            apart: whether another request still waits for the point on which the ranks agree.
        """
        if self._withdrawable and self._may_stop(step, epochs):
            self.ask(next(iter(self._withdrawable.values())))
            return True
        return self.requested and not apart and self._may_stop(step, epochs)

    def _may_stop(self, step: int, epochs: int) -> bool:
        return step >= self._min_steps and epochs >= self._min_epochs

    def _check_deadline(self) -> None:
        if self._deadline is not None and not self.requested and time.monotonic() >= self._deadline:
            self._time_is_up = True
            self.ask(f"max_time={self._max_time} is up")

    def _publish_reason(self) -> None:
        if self._store is not None and self.own_reason is not None:
            self._store.compare_set("stop/because", "", self.own_reason)

    def _reason_code(self) -> int:
        return _TIME_IS_UP if self._time_is_up else 1

    def _may_leave_behind(self) -> bool:
        if self._store is None or self._leave.reason == 0 or not self._store.check(["leave/reached"]):
            return False
        from drivetrain._distributed.process_groups import has_smaller_group  # only interrupted evaluations need it

        return not has_smaller_group()

    def _conclude(self) -> None:
        self._held = False
        self._leave.conclude()
        self._stop.conclude()

    def _hold(self) -> int:
        """Hold the main thread, and return the next point at which it is held. Called in either thread.

        The ranks that have not arrived do not wait for a rank that waits for them.
        """
        self._held = True
        return 0 if self._waits else self._point + 1

    def _poll(self, store: Store) -> None:
        """Send this rank's request, and answer those of other ranks. Called in the watchdog thread."""
        if self.signal:
            self._leave.request(self.signal, store)
        self._leave.poll(store)
        self._stop.poll(store)


def limit_reached(max_epochs: int | None, max_steps: int, epoch: int, global_step: int) -> str | None:
    """Return the limit that a run has reached, in words; None if it continues.

    Args:
        max_epochs: None or -1 for no limit.
        max_steps: -1 for no limit.
        epoch: epochs completed.
        global_step: optimizer steps made.
    """
    steps_reached = 0 <= max_steps <= global_step
    epochs_reached = max_epochs is not None and 0 <= max_epochs <= epoch
    if not steps_reached:
        return f"max_epochs={max_epochs} is reached" if epochs_reached else None
    return f"max_steps={max_steps} {f'and max_epochs={max_epochs} are' if epochs_reached else 'is'} reached"
