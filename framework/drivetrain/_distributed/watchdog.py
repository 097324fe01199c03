"""A thread beside each rank's work, which says where the rank is to whoever waits for it."""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

_LOOK = 0.5  # seconds between two looks at the store
_ANSWER = timedelta(seconds=3)  # how long a rank that asks waits for answers
_DEEPEST = 12  # lines of a stack that are told
_LAST_ANSWER = 5.0  # seconds that a request under way may take, once nobody needs it


class Watchdog:
    """Looks into the store for as long as a run lasts; at nothing else, and at no time of the step's.

    Args:
        store: the run's, for this thread alone: a call that waits holds a connection.
        rank: this rank.
        leave_record: called where somebody waits in vain.
        on_failure: called once a rank, this one or another, has reported that it failed; None does not look for that.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        leave_record: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._leave_record = leave_record
        self._on_failure = on_failure
        self._store = store
        self._rank = rank
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drivetrain-watchdog", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look no more. Behind a cut cable the store does not answer, and the thread is left to its waiting."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LAST_ANSWER)

    def _run(self) -> None:
        answered = late = 0
        with contextlib.suppress(RuntimeError):  # the store is gone, and the main thread will notice
            while not self._over.wait(_LOOK):
                if self._on_failure is not None and self._store.add("failures", 0):
                    on_failure, self._on_failure = self._on_failure, None
                    on_failure()
                asked = self._store.add("stacks/asked", 0)
                if asked > answered:
                    answered = asked
                    self._store.set(f"stacks/{asked}/{self._rank}", stack_of(self._watched))
                    if self._store.add("stacks/late", 0) > late:
                        late = self._store.add("stacks/late", 0)
                        self._leave_record()


def stack_of(thread: int) -> str:
    """Return where a thread of this process is, innermost call first, as `faulthandler` sees it."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    for part in text.split("\n\n"):
        head, _, body = part.partition("\n")
        if f"0x{thread:016x}" in head:
            return "\n".join(body.splitlines()[:_DEEPEST])
    return text.strip()


def stacks(store: Store, rank: int, world_size: int, late: bool = False) -> dict[int, str]:
    """Ask all ranks where they are; return what they answer, by rank. Who does not is missing from it.

    Where it is ``late``, and not only a look at who is alive, they leave their last collectives too.
    """
    if late:
        store.add("stacks/late", 1)
    number = store.add("stacks/asked", 1)
    store.set(f"stacks/{number}/{rank}", stack_of(threading.get_ident()))
    keys = {other: f"stacks/{number}/{other}" for other in range(world_size)}
    until = time.monotonic() + _ANSWER.total_seconds()
    while time.monotonic() < until and not store.check(list(keys.values())):
        time.sleep(0.05)
    return {other: store.get(key).decode() for other, key in keys.items() if store.check([key])}
