"""Determines whether a run is alive: from its process on this machine, from its heartbeat on other machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from drivetrain.runs._process import Job, Process, has_replaced
from drivetrain.runs._record import RUNNING, Record

HEARTBEAT_SECONDS = 30.0
"""Seconds between updates of a live run's record."""

WATCH_SECONDS = 90.0
"""Seconds to watch the record of a run with status "running" whose process cannot be checked."""

running_ids: set[str] = set()
"""Ids of the runs that are active in this process."""


def is_alive(record: Record, jobs: Sequence[Job]) -> bool | None:
    """Return whether a run is alive; None if only its heartbeat can show it.

    Args:
        record: the run's record.
        jobs: the jobs that this process belongs to. An earlier process of the same job is known to have ended.
    """
    if record.status != RUNNING:
        return False
    if any(job.is_same(other) and job.restarts > other.restarts for job in jobs for other in record.jobs):
        return False
    process = record.process
    process_is_alive = None if process is None else process.is_alive()
    if process_is_alive and process == Process.here():
        return record.id in running_ids
    if process_is_alive is None and has_replaced(list(jobs), record.jobs):
        return False
    return process_is_alive


class HeartbeatWatch:
    """Watches the record of a run whose process cannot be checked from this machine.

    Args:
        record: the record when it was read first.
        seconds: how long to watch.
        read: returns the current record of a folder; None if there is none.
    """

    def __init__(self, record: Record, seconds: float, read: Callable[[str], Record | None]) -> None:
        self.record = record
        self._read = read
        self.latest: Record | None = None
        """The record when it was read last; None if it was not read again, or no longer exists."""
        self._deadline = time.monotonic() + seconds
        self.is_alive: bool | None = None
        """Whether the run is alive; None while its record has not changed."""

    @property
    def is_over(self) -> bool:
        """Whether `is_alive` is known, or the time is up."""
        return self.is_alive is not None or time.monotonic() >= self._deadline

    def poll(self, pause: float) -> None:
        """Wait for at most ``pause`` seconds, then read the record again.

        Raises:
            StorageError: the record cannot be read.
        """
        time.sleep(max(0.0, min(pause, self._deadline - time.monotonic())))
        latest = self.latest = self._read(self.record.folder)
        if latest is not None and latest.document != self.record.document:
            self.is_alive = latest.status == RUNNING
