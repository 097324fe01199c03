"""FailureExchange: how the ranks of a run tell each other why they fail, through their store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure, first_cause

_POLL = 0.05  # seconds between two polls of the store


class FailureExchange:
    """Publishes failures to the other ranks, and reads theirs. No method is collective.

    Args:
        store: the store under the run's prefix.
        rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.external: Callable[[], Sequence[Failure]] = tuple
        """Returns failures that another observer of the processes, such as their launcher, has detected."""
        self.has_reported = False
        """Whether this rank has reported a failure."""

    def report(self, failure: Failure) -> None:
        """Publish a failure of this rank, or of another rank that cannot do so."""
        self.has_reported = True
        number = self._store.add("failures", 1)
        self._store.set(f"failure/{number}", failure.encode())

    def first(self, wait: timedelta = timedelta(0)) -> Failure | None:
        """Return the first failure with `Failure.distance` 0, if one is reported within ``wait``.

        Otherwise return a report of absent ranks if there is one, because no further report may arrive, or None.
        """
        end = time.monotonic() + wait.total_seconds()
        while True:
            reports = self.reports()
            causes = [failure for failure in reports if failure.distance < 2]
            cause = first_cause(causes) if causes else None
            done = len(reports) >= self._world_size or time.monotonic() >= end
            if done or (cause is not None and cause.distance == 0):
                return cause
            time.sleep(_POLL)

    def all(self, wait: timedelta) -> list[Failure]:
        """Return the reported failures once all ranks have failed or ``wait`` has passed."""
        end = time.monotonic() + wait.total_seconds()
        while self.silent_ranks() and time.monotonic() < end:
            time.sleep(_POLL)
        return self.reports()

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have not reported a failure, and may still do so."""
        return sorted(set(range(self._world_size)) - {failure.rank for failure in self.reports()})

    def reports(self) -> list[Failure]:
        """Return the failures that have been reported until now."""
        count = self._store.add("failures", 0)
        reports = [Failure.decode(self._store.get(f"failure/{number + 1}")) for number in range(count)]
        # A rank that was killed cannot report its failure, but its launcher may.
        reported = {failure.rank for failure in reports}
        return reports + [failure for failure in self.external() if failure.rank not in reported]

    def wait_for_acknowledgements(self, wait: timedelta) -> None:
        """Wait, at most ``wait``, until all ranks have seen a failure, because this process may host the store."""
        self._store.set(f"settled/{self._rank}", "")
        end = time.monotonic() + wait.total_seconds()
        while time.monotonic() < end:
            ended = {failure.rank for failure in self.external() if failure.exit_code is not None}
            pending = [f"settled/{rank}" for rank in range(self._world_size) if rank not in ended]
            if not pending or self._store.check(pending):
                return
            time.sleep(_POLL)
