"""Determines whether a run is alive: from its process on this machine, from its heartbeat on other machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from drivetrain._runs.process import Job, Process
from drivetrain._runs.record import RUNNING, Record

HEARTBEAT_SECONDS = 30.0
"""Seconds between updates of a live run's record."""

POLL_SECONDS = 5.0
"""Seconds between two reads of a record that is watched."""

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
    if process_is_alive is None and any(job.replaces(other) for job in jobs for other in record.jobs):
        return False
    return process_is_alive


def watch(run: Record, read: Callable[[str], Record | None], after_look: Callable[[], object]) -> bool:
    """Watch the record of a run whose process cannot be checked from this machine, and return whether it is under way.

    Args:
        run: the run, as its record was read first.
        read: returns the current record of a folder; None if there is none.
        after_look: called after each look at the record that has shown nothing.

    Raises:
        StorageError: the record cannot be read.
    """
    deadline = time.monotonic() + WATCH_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(POLL_SECONDS, remaining))
        now = read(run.folder)
        if now is not None and now.document != run.document:
            return now.status == RUNNING
        after_look()
    return False
