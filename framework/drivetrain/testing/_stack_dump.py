"""Dumps the stacks of a process that exceeds its time limit or ends with a fault such as SIGSEGV."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain._distributed.watchdog import dumped_stacks

_FALLBACK_DELAY = 2.0  # seconds that the timer's thread gets to dump the stacks


@contextmanager
def dump_stacks_to(path: Path, seconds: float) -> Iterator[None]:
    """Write the stacks of all threads to ``path`` at a fault, and if the block is still running after ``seconds``.

    After ``seconds``, a Python thread that holds the GIL writes the stacks. `faulthandler.dump_traceback_later` reads
    stacks while they change, and this crashes about one busy process in ten. The function is therefore only the
    fallback for a thread that hangs while it holds the GIL.
    """
    with path.open("w") as file:

        def dump() -> None:
            faulthandler.cancel_dump_traceback_later()
            others = [stack for stack in dumped_stacks() if not stack.startswith("Current thread")]
            file.write("\n\n".join(others))
            file.flush()

        faulthandler.enable(file)
        faulthandler.dump_traceback_later(seconds + _FALLBACK_DELAY, file=file)
        timer = threading.Timer(seconds, dump)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
