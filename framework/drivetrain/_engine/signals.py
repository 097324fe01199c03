"""Signals during a fit: the first asks the run to save and leave, a second one ends it at once."""

from __future__ import annotations

import atexit
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
from drivetrain._distributed.failure import RankFailedError
from drivetrain.launchers.choose import is_interactive

_ECHO = 0.5
"""Seconds within which a signal that comes again is the same: a launcher passes on what its group got already."""

_COME_OUT = 1.0
"""Seconds that the main thread gets, after a second signal, to raise: it may be in a collective that never ends."""

_GIVE_UP = 12.0
"""Seconds that it gets after a first one where there is nothing to save: schedulers wait for fifteen and more."""


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


def as_asked(error: BaseException, numbers: Sequence[int]) -> BaseException:
    """Return what to raise for ``error``, which may follow from another rank's leaving for a signal before training.

    Args:
        error: what was caught.
        numbers: the signals that a run leaves for.
    """
    if not isinstance(error, RankFailedError) or error.failure.error_type != "SystemExit":
        return error
    asked = [number for number in numbers if error.failure.message == str(128 + number)]
    return interruption(asked[0]) if asked else error


class Signals:
    """Takes signals within its ``with``. In the main thread only; in others it does nothing.

    Until `wait_for_the_run` there is nothing to save: what would have ended the process raises at once, and what a
    handler of the user's waits for is his. Then the first signal is for the run, and one that comes twice raises in the
    main thread. Where that thread is in a call that does not return, such as a collective, no handler of Python's runs
    there: a thread of its own then ends the process.

    Args:
        numbers: the signals.
        arrived: called with the first one that the run is to heed.
    """

    def __init__(self, numbers: Sequence[int], arrived: Callable[[int], None]) -> None:
        self._numbers = numbers
        self._arrived = arrived
        self._previous: dict[int, Any] = {}
        self._wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._handled = _Repetition()
        self._watch: _Watch | None = None
        self.answered = False
        """Set once the run has done what the signal wants."""
        self.raised = 0
        """The signal that came before there was anything to save, and has raised."""

    def __enter__(self) -> Self:
        if not self._numbers or threading.current_thread() is not threading.main_thread():
            return self
        ours = [number for number in self._numbers if _ends_the_process(signal.getsignal(number))]
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous = {number: signal.signal(number, self._raise) for number in ours}
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._watch = _Watch(self._pipe[0], self._wakeup, ends=not is_interactive())
        self._watch.expect(ours, at_once=True)
        self._thread = threading.Thread(target=self._watch.run, name="drivetrain-signals", daemon=True)
        self._thread.start()
        _keep_out_of_children(self)
        return self

    @property
    def listening(self) -> bool:
        """Whether signals are taken now."""
        return self._pipe is not None

    def wait_for_the_run(self) -> None:
        """From now on there is something to save: the first signal is for the run to heed."""
        if self._watch is None:
            return
        self._watch.expect(self._numbers, at_once=False)
        for number in self._numbers:
            handler = signal.signal(number, self._handle)
            self._previous.setdefault(number, handler)

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
            # The run was over before it could ask: the signal is for whoever is asked now.
            if signal.getsignal(late) is signal.SIG_DFL:
                raise interruption(late)
            signal.raise_signal(late)

    def put_back(self) -> None:
        """Give the signals back to who had them before."""
        signal.set_wakeup_fd(self._wakeup)
        # Launchers end the others by a signal as soon as one rank has left: who is leaving too does so as it was asked.
        leaving = self.answered and os.environ.get("WORLD_SIZE", "1") != "1"
        for number, handler in self._previous.items():
            if signal.getsignal(number) in (self._handle, self._raise) and handler is not None:
                leaves_again = leaving and handler is signal.SIG_DFL
                signal.signal(number, _leave if leaves_again else handler)
                if leaves_again:
                    atexit.register(signal.signal, number, signal.SIG_IGN)  # it is on its way out, with its code

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._handled.is_repeated(number) and not self.answered:
            self.answered = True
            self.raised = number
            assert self._watch is not None
            self._watch.has_raised = True
            raise interruption(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._handled.first == 0:
            self._handled.is_repeated(number)
            self._arrived(number)
        elif self._handled.is_repeated(number):
            raise interruption(number)


def _ends_the_process(handler: Any) -> bool:
    """Whether a handler is the system's, or the one that elastic gives to functions' processes."""
    return handler is signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("torch.distributed.elastic")


def _leave(number: int, frame: FrameType | None) -> None:
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
    """Reads what signals write to the pipe, and ends the process where one is not raised in time."""

    def __init__(self, pipe: int, forward: int, *, ends: bool) -> None:
        self._pipe = pipe
        self._forward = forward
        self._ends = ends
        self._expected: tuple[Sequence[int], bool] = ((), False)
        self._seen = _Repetition()
        self._come = b""
        self._ended = False
        self.has_raised = False
        """Whether the main thread has come out of what it was in, for the first signal's sake."""

    def expect(self, numbers: Sequence[int], *, at_once: bool) -> None:
        """Heed these signals from now on: each, or (not ``at_once``) only one that comes twice."""
        self._expected = (numbers, at_once)

    def run(self) -> None:
        while not self._over(None):
            for number in self._come:
                if self._forward != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._forward, bytes([number]))
                numbers, at_once = self._expected
                if number not in numbers or not self._ends:
                    continue
                if self._seen.is_repeated(number):
                    self._end(number, twice=True)
                elif at_once:
                    self._end(number, twice=False)

    def _over(self, seconds: float | None) -> bool:
        """Wait for what comes next; tell whether it is the end of the run."""
        if not self._ended:
            ready, _, _ = select.select([self._pipe], [], [], seconds)
            self._come = os.read(self._pipe, 64) if ready else b""
            self._ended = 0 in self._come
        return self._ended

    def _end(self, number: int, *, twice: bool) -> None:
        """End the process, unless the run ends in time, or has come out of what it was in and is asked only once."""
        until = time.monotonic() + (_COME_OUT if twice else _GIVE_UP)
        while (left := until - time.monotonic()) > 0:
            if self._over(left):
                return
            if not twice and any(self._seen.is_repeated(one) for one in self._come):
                twice, until = True, min(until, time.monotonic() + _COME_OUT)
        if self.has_raised and not twice:
            return
        why = "came twice" if twice else f"came, and the run did not end within {_GIVE_UP:g} s"
        for child in multiprocessing.active_children():
            child.kill()  # data-loading workers, which are in groups of their own
        os.write(2, f"{signal.Signals(number).name} {why}: the process ends at once.\n".encode())
        os._exit(128 + number)
