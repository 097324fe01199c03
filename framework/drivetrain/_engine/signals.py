"""Signals during training: the first asks the run to save and leave, a second one ends it at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from drivetrain._config.arguments import signal_numbers
from drivetrain.launchers.choose import is_interactive

_ECHO = 0.5
"""Seconds within which a signal that comes again is the same: a launcher passes on what its group got already."""

_COME_OUT = 1.0
"""Seconds that the main thread gets, after a second signal, to raise: it may be in a collective that never ends."""


def awaited_signals(setting: str | list[str] | None, variables: Mapping[str, str]) -> tuple[int, ...]:
    """Return the signals that ``Fit(preemption_signals=setting)`` means: Ctrl-C's among them, or none at all.

    Args:
        setting: "auto", one name, several, or None.
        variables: the environment: in a job of SLURM's "auto" means SIGUSR1 too.
    """
    if setting is None:
        return ()
    names: str | list[str] = setting
    if setting == "auto":
        names = ["SIGTERM", "SIGUSR1"] if variables.get("SLURM_JOB_ID") else ["SIGTERM"]
    return tuple(dict.fromkeys([signal.SIGINT, *signal_numbers(names)]))


def interruption(number: int) -> BaseException:
    """Return what a run raises that left because of signal ``number``."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


class Signals:
    """Takes signals from `listen` on until the end of its ``with``. In the main thread only; in others it does nothing.

    A signal that comes twice raises in the main thread. Where that thread is in a call that does not return, such as
    a collective, no handler of Python's runs there: a thread of its own then ends the process.

    Args:
        numbers: the signals.
        arrived: called with the first one.
    """

    def __init__(self, numbers: Sequence[int], arrived: Callable[[int], None]) -> None:
        self._numbers = numbers
        self._arrived = arrived
        self._previous: dict[int, Any] = {}
        self._wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._handled = _Repetition()
        self.answered = False
        """Set once the run has done what the signal wants."""

    def __enter__(self) -> Self:
        return self

    @property
    def listening(self) -> bool:
        """Whether signals are taken now."""
        return self._pipe is not None

    def listen(self) -> None:
        """Take the signals from now on."""
        if not self._numbers or threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous = {number: signal.signal(number, self._handle) for number in self._numbers}
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        watch = _Watch(self._pipe[0], self._numbers, self._wakeup, ends=not is_interactive())
        self._thread = threading.Thread(target=watch.run, name="drivetrain-signals", daemon=True)
        self._thread.start()
        _keep_out_of_children(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        self.put_back()
        os.write(self._pipe[1], b"\0")
        assert self._thread is not None
        self._thread.join()
        for end in self._pipe:
            os.close(end)
        self._pipe = None
        late = self._handled.first
        if late and not self.answered and kind is None:
            signal.raise_signal(late)  # the run was over before it could ask: it is for whoever is asked now

    def put_back(self) -> None:
        """Give the signals back to who had them before."""
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle and handler is not None:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._handled.first == 0:
            self._handled.is_repeated(number)
            self._arrived(number)
        elif self._handled.is_repeated(number):
            raise interruption(number)


_listening: weakref.ref[Signals] | None = None
_registered = False


def _keep_out_of_children(signals: Signals) -> None:
    """Let what is forked from here, a data-loading worker, not take its own signals for ours."""
    global _listening, _registered
    _listening = weakref.ref(signals)
    if not _registered:
        os.register_at_fork(after_in_child=_put_back_in_child)
        _registered = True


def _put_back_in_child() -> None:
    global _listening
    signals = _listening() if _listening is not None else None
    _listening = None
    if signals is not None and signals.listening:
        signals.put_back()
        signal.set_wakeup_fd(-1)  # whose other end is the parent's


class _Repetition:
    """Tells a second signal from the first one that comes again by another way."""

    def __init__(self) -> None:
        self.first = 0
        self._since = 0.0

    def is_repeated(self, number: int) -> bool:
        """Take note of a signal. SIGTERM after SIGUSR1 is a scheduler's next warning, and cuts no save short."""
        now = time.monotonic()
        if self.first == 0:
            self.first, self._since = number, now
            return False
        return number in (self.first, signal.SIGINT) and now - self._since >= _ECHO


class _Watch:
    """Reads what signals write to the pipe, and ends the process where a second one is not raised in time."""

    def __init__(self, pipe: int, numbers: Sequence[int], forward: int, *, ends: bool) -> None:
        self._pipe = pipe
        self._numbers = numbers
        self._forward = forward
        self._ends = ends
        self._seen = _Repetition()
        self._come = b""
        self._ended = False

    def run(self) -> None:
        while not self._over(None):
            for number in self._come:
                if self._forward != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._forward, bytes([number]))
                if number in self._numbers and self._seen.is_repeated(number) and self._ends:
                    self._end(number)

    def _over(self, seconds: float | None) -> bool:
        """Wait for what comes next; tell whether it is the end of the run."""
        if not self._ended:
            ready, _, _ = select.select([self._pipe], [], [], seconds)
            self._come = os.read(self._pipe, 64) if ready else b""
            self._ended = 0 in self._come
        return self._ended

    def _end(self, number: int) -> None:
        if self._over(_COME_OUT):
            return
        for child in multiprocessing.active_children():
            child.kill()  # data-loading workers, which are in groups of their own
        os.write(2, f"{signal.Signals(number).name} came twice: the process ends at once.\n".encode())
        os._exit(128 + number)
