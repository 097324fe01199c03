"""PointAgreement: lets all ranks act at the same point of their loops, without a collective."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.control_plane import ControlPlane


class PointAgreement:
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
