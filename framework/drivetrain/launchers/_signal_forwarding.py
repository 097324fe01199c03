"""Forwards signals from the process that launched a run to the processes of the ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from drivetrain._distributed.failure import Failure
from drivetrain.launchers._processes import Processes


class SignalForwarding:
    """Context manager in which signals to this process are forwarded to the processes of the ranks.

    Signals are forwarded only if the object is created in the main thread.

    Args:
        processes: the processes that get the signals.
        numbers: the signals to forward.
    """

    def __init__(self, processes: Processes, numbers: Sequence[int]) -> None:
        self._processes = processes
        self._numbers = numbers if threading.current_thread() is threading.main_thread() else ()
        self._previous: dict[int, Any] = {}
        self._forwarded: set[int] = set()

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._forward) for number in self._numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            if handler is not None:
                signal.signal(number, handler)

    def fatal_signal(self, failures: Sequence[Failure]) -> int | None:
        """Return a forwarded signal that ended a rank because the rank did not handle the signal, or None."""
        for number in self._forwarded:
            name = signal.Signals(number).name
            if any(failure.signal_name == name for failure in failures):
                return number
        return None

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._forwarded.add(number)
        self._processes.send(number)
