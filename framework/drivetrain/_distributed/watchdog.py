"""Watchdog: a thread on each rank that polls the store, and answers requests while the main thread is busy."""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

_POLL = 0.5  # seconds between two polls of the store
_ANSWER_TIMEOUT = timedelta(seconds=3)  # how long a rank waits for the stacks of other ranks
_MAX_LINES = 12  # the maximum number of lines of a stack in an answer
_LAST_ANSWER_TIMEOUT = 5.0  # seconds to wait for a pending request at the end


class Watchdog:
    """Polls the store during a run, on a separate thread that does not slow down training steps.

    Args:
        store: a connection to the run's store that only this thread uses, because a waiting call blocks a connection.
        rank: this rank.
        dump_record: a function to call when a rank has waited too long for other ranks.
        on_failure: a function to call when any rank has reported a failure. It is called at most once. None disables
            the check for failures.
        on_poll: a function to call with ``store`` at each poll.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        dump_record: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] | None = None,
        on_poll: Callable[[Store], None] = lambda store: None,
    ) -> None:
        self._dump_record = dump_record
        self._on_failure = on_failure
        self._on_poll = on_poll
        self._store = store
        self._rank = rank
        self._watched_thread = threading.get_ident()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drivetrain-watchdog", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop polling. If the store does not answer, for example after a network failure, the thread is abandoned."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LAST_ANSWER_TIMEOUT)

    def _run(self) -> None:
        answered = late = 0
        with contextlib.suppress(RuntimeError):  # the store no longer exists, and the main thread notices this too
            while not self._stopping.wait(_POLL):
                if self._on_failure is not None and self._store.add("failures", 0):
                    on_failure, self._on_failure = self._on_failure, None
                    on_failure()
                self._on_poll(self._store)
                requests = self._store.add("stacks/asked", 0)
                if requests > answered:
                    answered = requests
                    self._store.set(f"stacks/{requests}/{self._rank}", format_stack(self._watched_thread))
                    if self._store.add("stacks/late", 0) > late:
                        late = self._store.add("stacks/late", 0)
                        self._dump_record()


def format_stack(thread: int) -> str:
    """Return the stack of a thread of this process, innermost call first, from `faulthandler`."""
    stacks = dumped_stacks()
    for stack in stacks:
        head, _, body = stack.partition("\n")
        if f"0x{thread:016x}" in head:
            return "\n".join(body.splitlines()[:_MAX_LINES])
    return "\n\n".join(stacks).strip()


def dumped_stacks() -> list[str]:
    """Return the stack of each thread of this process, below a line with the thread's number, from `faulthandler`."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().split("\n\n")


def request_stacks(store: Store, rank: int, world_size: int, late: bool = False) -> dict[int, str]:
    """Request the stacks of all ranks, and return the answers by rank, without the ranks that do not answer.

    ``late`` means that ranks did not arrive in time. All ranks then also dump their last collectives.
    """
    if late:
        store.add("stacks/late", 1)
    number = store.add("stacks/asked", 1)
    store.set(f"stacks/{number}/{rank}", format_stack(threading.get_ident()))
    keys = {other: f"stacks/{number}/{other}" for other in range(world_size)}
    deadline = time.monotonic() + _ANSWER_TIMEOUT.total_seconds()
    while time.monotonic() < deadline and not store.check(list(keys.values())):
        time.sleep(0.05)
    return {other: store.get(key).decode() for other, key in keys.items() if store.check([key])}
