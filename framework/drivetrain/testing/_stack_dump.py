"""Leaves the stacks of a process that has not come to its end in time, or that a fault such as SIGSEGV ends."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECOND_TRY = 2.0  # seconds for a thread to come to its turn


@contextmanager
def stacks_left_in(path: Path, seconds: float) -> Iterator[None]:
    """Write where every thread is to ``path`` at a fault, and when the block is still at work after ``seconds``.

    A thread of Python's does so, and nothing else runs meanwhile. `faulthandler.dump_traceback_later` reads stacks as
    they change, of which one busy process in ten dies. It is left to tell what no thread can: who is stuck with the
    interpreter's lock in hand.
    """
    with path.open("w") as file:

        def tell() -> None:
            faulthandler.cancel_dump_traceback_later()
            file.write(_stacks_of_others())
            file.flush()

        faulthandler.enable(file)
        faulthandler.dump_traceback_later(seconds + _SECOND_TRY, file=file)
        timer = threading.Timer(seconds, tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def _stacks_of_others() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        parts = file.read().split("\n\n")
    return "\n\n".join(part for part in parts if not part.startswith("Current thread"))
