"""Whether a run is under way: its process is looked for on this machine, and its heartbeat watched elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from drivetrain.runs._process import Job, Process, has_replaced
from drivetrain.runs._record import RUNNING, Record

HEARTBEAT_SECONDS = 30.0
"""Seconds between two updates of a run's record."""

WATCH_SECONDS = 90.0
"""Seconds for which a record that says "running" is watched, where its process cannot be looked for."""

running_ids: set[str] = set()
"""The ids of the runs that are under way in this process."""


def is_alive(record: Record, jobs: Sequence[Job]) -> bool | None:
    """Whether a run is under way; None where only its heartbeat can tell.

    Args:
        record: what it says of itself.
        jobs: those of this process. What ran as the same job before has ended.
    """
    if record.status != RUNNING:
        return False
    if any(one.is_same(other) and one.restarts > other.restarts for one in jobs for other in record.jobs):
        return False
    process = record.process
    lives = None if process is None else process.lives()
    if lives and process == Process.here():
        return record.id in running_ids
    if lives is None and has_replaced(list(jobs), record.jobs):
        return False
    return lives


class HeartbeatWatch:
    """Watches the record of a run whose process is out of sight.

    Args:
        record: as it was read.
        seconds: for how long.
        read: returns the record that lies in a folder now.
    """

    def __init__(self, record: Record, seconds: float, read: Callable[[str], Record | None]) -> None:
        self.record = record
        self._read = read
        self.latest: Record | None = None
        """As it was read last."""
        self._until = time.monotonic() + seconds
        self.is_alive: bool | None = None
        """What has been seen; None while nothing has changed."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be learnt."""
        return self.is_alive is not None or time.monotonic() >= self._until

    def poll(self, pause: float) -> None:
        """Wait for so many seconds at most, and look once more.

        Raises:
            StorageError: the storage refuses.
        """
        time.sleep(max(0.0, min(pause, self._until - time.monotonic())))
        latest = self.latest = self._read(self.record.folder)
        if latest is not None and latest.document != self.record.document:
            self.is_alive = latest.status == RUNNING
