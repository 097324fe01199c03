"""Handles signals during a run: the first one asks the run to leave, a second one ends it immediately."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from drivetrain._config.argument_checks import signal_numbers
from drivetrain._distributed.failure import RankFailedError
from drivetrain.launchers.choose import is_interactive

logger = logging.getLogger("drivetrain")

_DUPLICATE_INTERVAL = 0.5
"""Seconds within which a repeated signal is a duplicate: launchers forward signals that each process got already."""

_SECOND_SIGNAL_GRACE = 1.0
"""Seconds in which the main thread has to raise after a second signal. It may be in a collective that never ends."""

_FIRST_SIGNAL_GRACE = 12.0
"""Seconds in which the main thread has to raise after a first signal with nothing to save. Schedulers allow 15 s."""

_SCONTROL_TIMEOUT = 30  # seconds


def handled_signals(setting: str | list[str] | None, variables: Mapping[str, str], stage: str) -> tuple[int, ...]:
    """Return the signals that a run handles: SIGINT and the signals of ``Fit(preemption_signals=setting)``, or none.

    Args:
        setting: "auto", one name, several names, or None to handle no signal.
        variables: the environment variables; in a SLURM job "auto" includes SIGUSR1.
        stage: "fit" or an evaluation. An evaluation in a hook of another run leaves the signals to that run, which may
            have something to save.
    """
    if setting is None or (stage != "fit" and _handling() is not None):
        return ()
    names: str | list[str] = setting
    if setting == "auto":
        names = ["SIGTERM", "SIGUSR1"] if variables.get("SLURM_JOB_ID") else ["SIGTERM"]
    return tuple(dict.fromkeys([signal.SIGINT, *signal_numbers(names)]))


def interruption_error(number: int) -> BaseException:
    """Return the exception that a run raises when it stops for signal ``number``."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def announce(number: int, stage: str, trial: bool) -> None:
    """Log how a run of ``stage``, or a trial, reacts to its first signal."""
    reaction = "the run saves its last whole step and ends" if stage == "fit" else "the run ends after this batch"
    if trial:
        reaction = "the trial ends after this step"
    logger.warning("%s: %s. A second signal ends it at once.", signal.Signals(number).name, reaction)


def as_interruption(error: BaseException, numbers: Sequence[int]) -> BaseException:
    """Return ``error``; if it reports that another rank stopped for a signal, return the exception for this signal.

    Args:
        error: the error that was caught.
        numbers: the signals that the run handles.
    """
    if not isinstance(error, RankFailedError) or error.failure.error_type != "SystemExit":
        return error
    received = [number for number in numbers if error.failure.message == str(128 + number)]
    return interruption_error(received[0]) if received else error


def requeue(number: int, variables: Mapping[str, str]) -> None:
    """Requeue this SLURM job if the run stopped because of a signal that only announces the job's time limit.

    Called only for a fit, which goes on where it ended: a job that starts again from the beginning each time might
    never finish.

    ``sbatch --signal=USR1@90`` sends such a signal. SIGTERM does not count: ``scancel`` sends it too, and SLURM itself
    requeues a job that it preempts.

    Args:
        number: the signal's number.
        variables: the environment variables.
    """
    job = variables.get("SLURM_JOB_ID")
    if job is None or number in (signal.SIGINT, signal.SIGTERM):
        return
    command = ["scontrol", "requeue", job]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT, check=False)
        problem = result.stderr.strip() if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        logger.warning("%s: %s. Submit the job again to resume from the newest checkpoint.", " ".join(command), problem)
    else:
        logger.warning("%s: the job is queued again.", " ".join(command))


class Signals:
    """Handles signals within its ``with`` block, which has no effect in threads other than the main thread.

    Until `defer_to_run` is called, there is nothing to save: a signal that would have ended the process raises
    immediately, and handlers of the user stay in place. From then on, the first signal is passed to the run, and a
    second signal raises in the main thread. Python runs no handler while the main thread is in a call that does not
    return, such as a collective. In this case a watcher thread ends the process.

    Args:
        numbers: the signals to handle.
        arrived: called with the first signal after `defer_to_run`, possibly twice: in the main thread, and in the
            watcher thread, which need not wait until the main thread runs Python code again.
    """

    def __init__(self, numbers: Sequence[int], arrived: Callable[[int], None]) -> None:
        self._numbers = numbers
        self._arrived = arrived
        self._previous: dict[int, Any] = {}
        self._wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._received = _SignalHistory()
        self._watcher: _Watcher | None = None
        self._outer: Signals | None = None  # those of the run in whose hook this run was started
        self.handled = False
        """Whether the run has stopped because of the signal."""
        self.raised = 0
        """The signal that raised an exception before `defer_to_run`; 0 for none."""

    def __enter__(self) -> Self:
        if not self._numbers or threading.current_thread() is not threading.main_thread():
            return self
        unhandled = [number for number in self._numbers if _ends_the_process(signal.getsignal(number))]
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._previous = {number: signal.signal(number, self._raise) for number in unhandled}
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._watcher = _Watcher(self._pipe[0], self._wakeup, self._arrived, may_exit=not is_interactive())
        self._watcher.expect(unhandled, at_once=True)
        self._thread = threading.Thread(target=self._watcher.run, name="drivetrain-signals", daemon=True)
        self._thread.start()
        self._outer = _handling()
        _restore_after_fork(self)
        return self

    @property
    def is_active(self) -> bool:
        """Whether signals are being handled."""
        return self._pipe is not None

    def defer_to_run(self) -> None:
        """Pass the first signal to the run from now on, since there is something to save or to complete."""
        if self._watcher is None:
            return
        self._watcher.expect(self._numbers, at_once=False)
        for number in self._numbers:
            handler = signal.signal(number, self._handle)
            self._previous.setdefault(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        self.restore_handlers()
        os.write(self._pipe[1], b"\0")
        assert self._thread is not None
        self._thread.join()
        for end in self._pipe:
            os.close(end)
        self._pipe = None
        _restore_after_fork(self._outer)
        received = self._received.first
        if received and not self.handled and kind is None:
            # The run ended before it could act on the signal: pass it to the restored handler.
            if signal.getsignal(received) is signal.SIG_DFL:
                raise interruption_error(received)
            signal.raise_signal(received)

    def restore_handlers(self) -> None:
        """Restore the previous handlers."""
        signal.set_wakeup_fd(self._wakeup)
        # Launchers signal the other ranks once a rank has exited. A rank that is stopping already keeps its exit code.
        leaving = self.handled and os.environ.get("WORLD_SIZE", "1") != "1"
        for number, handler in self._previous.items():
            if signal.getsignal(number) in (self._handle, self._raise) and handler is not None:
                exits = leaving and handler is signal.SIG_DFL
                signal.signal(number, _raise_interruption if exits else handler)
                if exits:
                    # A signal while the process exits must not change its exit code.
                    atexit.register(signal.signal, number, signal.SIG_IGN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._received.is_repeated(number) and not self.handled:
            self.handled = True
            self.raised = number
            assert self._watcher is not None
            self._watcher.has_raised = True
            raise interruption_error(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received.first == 0:
            self._received.is_repeated(number)
            self._arrived(number)
        elif self._received.is_repeated(number):
            raise interruption_error(number)


def _ends_the_process(handler: Any) -> bool:
    """Whether a handler is the default handler, or the handler that torch elastic sets in processes that it starts."""
    return handler is signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("torch.distributed.elastic")


def _raise_interruption(number: int, frame: FrameType | None) -> None:
    raise interruption_error(number)


_active: weakref.ref[Signals] | None = None
_registered = False


def _handling() -> Signals | None:
    """Return the signals of the innermost run that handles signals now."""
    signals = _active() if _active is not None else None
    return signals if signals is not None and signals.is_active else None


def _restore_after_fork(signals: Signals | None) -> None:
    """Restore the previous handlers in forked children, such as data-loading workers."""
    global _active, _registered
    _active = weakref.ref(signals) if signals is not None else None
    if not _registered:
        os.register_at_fork(after_in_child=_restore_in_child)
        _registered = True


def _restore_in_child() -> None:
    global _active
    signals = _handling()
    _active = None
    while signals is not None:
        signals.restore_handlers()
        signal.set_wakeup_fd(-1)  # the parent reads from this pipe
        signals = signals._outer


class _SignalHistory:
    """Distinguishes a second signal from a duplicate of the first one."""

    def __init__(self) -> None:
        self.first = 0
        self._since = 0.0

    def is_repeated(self, number: int) -> bool:
        """Record a signal. Return whether it ends the run immediately: it repeats the first signal, or is Ctrl-C.

        SIGTERM after SIGUSR1 is a second warning of a scheduler, and must not interrupt a save.
        """
        now = time.monotonic()
        if self.first == 0:
            self.first, self._since = number, now
            return False
        return number in (self.first, signal.SIGINT) and now - self._since >= _DUPLICATE_INTERVAL


class _Watcher:
    """Reads signal numbers from the wakeup pipe, passes on the first one, and ends the process if it does not react.

    Args:
        pipe: the read end of the pipe.
        forward: the previous wakeup descriptor, to which the numbers are forwarded; -1 for none.
        arrived: called with the first signal.
        may_exit: whether to end the process; False in an interactive process.
    """

    def __init__(self, pipe: int, forward: int, arrived: Callable[[int], None], *, may_exit: bool) -> None:
        self._pipe = pipe
        self._poll = select.poll()  # select.select refuses descriptors above 1,023
        self._poll.register(pipe, select.POLLIN)
        self._forward = forward
        self._arrived = arrived
        self._may_exit = may_exit
        self._expected: tuple[Sequence[int], bool] = ((), False)
        self._received = _SignalHistory()
        self._numbers = b""
        self._stopped = False
        self.has_raised = False
        """Whether the main thread has raised for the first signal."""

    def expect(self, numbers: Sequence[int], *, at_once: bool) -> None:
        """Watch these signals. The process has to end on the first one if ``at_once``, otherwise on a second one."""
        self._expected = (numbers, at_once)

    def run(self) -> None:
        while not self._read(None):
            for number in self._numbers:
                if self._forward != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._forward, bytes([number]))
                numbers, at_once = self._expected
                if number not in numbers:
                    continue
                twice = self._received.is_repeated(number)
                if not (twice or at_once):
                    self._arrived(number)
                elif self._may_exit:
                    self._exit_after_grace(number, twice=twice)

    def _read(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for signal numbers. Return whether the run has ended, which writes a 0."""
        if not self._stopped:
            ready = self._poll.poll(None if timeout is None else timeout * 1000)
            self._numbers = os.read(self._pipe, 64) if ready else b""
            self._stopped = 0 in self._numbers
        return self._stopped

    def _exit_after_grace(self, number: int, *, twice: bool) -> None:
        """Wait for the run to end or, after a single signal, for the main thread to raise; else end the process."""
        deadline = time.monotonic() + (_SECOND_SIGNAL_GRACE if twice else _FIRST_SIGNAL_GRACE)
        while (remaining := deadline - time.monotonic()) > 0:
            if self._read(remaining):
                return
            if not twice and any(self._received.is_repeated(each) for each in self._numbers):
                twice, deadline = True, min(deadline, time.monotonic() + _SECOND_SIGNAL_GRACE)
        if self.has_raised and not twice:
            return
        reason = "came twice" if twice else f"came, and the run did not end within {_FIRST_SIGNAL_GRACE:g} s"
        for child in multiprocessing.active_children():
            child.kill()  # data-loading workers, which are in their own process groups
        os.write(2, f"{signal.Signals(number).name} {reason}: the process ends at once.\n".encode())
        os._exit(128 + number)
