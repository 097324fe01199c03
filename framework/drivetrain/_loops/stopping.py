"""When a run stops, decided once for all ranks, and why, in words."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.progress import Progress

AGREE_EVERY = 16
"""Points between two looks at the store, at most."""

_LOOK = 0.5
"""Seconds between two looks that are aimed at: who asks for a signal's sake has half a minute, or less."""

_TIME_IS_UP = 2
"""Beside an ordinary request (1): the run shall go on some other day."""


class StepAgreement:
    """A point at which all ranks do something, agreed without a collective.

    Points are counted alike on all ranks: the ends of windows, and of micro-batches where a run may leave after one.
    Each rank publishes the point at which it will look next, and then looks for a request. Who requests first reads
    what all have published, and names the furthest of these points. A rank that looked too early to see the request
    had published its next look before, so the named point is at or after that look.

    Args:
        control: the way to the other ranks.
        name: of its keys in the store.
    """

    def __init__(self, control: ControlPlane, name: str) -> None:
        self._control = control
        self._store = control.store
        self._name = name
        self.asked = False
        self.point: int | None = None
        """Known once a look has found a request."""
        self.why = 0
        """The first request's reason, never 0; the same on all ranks."""

    def ask(self, point: int, why: int) -> None:
        """Request one, at this rank's ``point``. The first request stands."""
        store = self._store
        assert store is not None
        self.asked = True
        if store.add(f"{self._name}/asking", 1) == 1:
            store.set(f"{self._name}/asked", "")  # from here on nobody publishes a look and goes on
            points = [point]
            for rank in range(self._control.world_size):
                if store.check([f"looks/{rank}"]):
                    points.append(int(store.get(f"looks/{rank}")))
            store.set(f"{self._name}/after", f"{max(points)} {why}")
        self._take()

    def look(self) -> None:
        """See whether anybody has requested one."""
        assert self._store is not None
        if self.point is None and self._store.check([f"{self._name}/asked"]):
            self._take()

    def is_kept(self, point: int) -> bool:
        """Whether its point has come."""
        return self.point is not None and point >= self.point

    def settle(self, asking: int) -> int:
        """Where all ranks stand at the same point, ``asking`` of them with a request: return why, or 0.

        Who asks has called `leave_word` before the ranks counted.
        """
        if asking:
            self.point, self.asked = 0, True
            if self._store is not None:
                self.why = int(self._store.get(f"{self._name}/word"))
        return self.why

    def leave_word(self, why: int) -> bool:
        """Say ``why`` this rank asks, before the ranks count who does; returns whether it does."""
        if why and self._store is not None:
            self._store.compare_set(f"{self._name}/word", "", str(why))
        elif why:
            self.why = why
        return why > 0

    def _take(self) -> None:
        assert self._store is not None
        point, why = self._store.get(f"{self._name}/after").split()
        self.point, self.why, self.asked = int(point), int(why), True


class StopRequest:
    """Anybody may ask to stop, on any rank; all ranks then stop after the same window.

    There are two kinds. A stop ends the run in its ordinary way, after a window, and not before ``min_steps`` and
    ``min_epochs``. To *leave*, for a signal's sake, is to save and be gone: nothing holds that back, and it need not
    wait for the end of a long window or of a validation.

    Points are counted rather than the optimizer's steps: a window may make none, and a run none at all.

    Args:
        control: the way to the other ranks.
        max_time: after which a stop is requested; None for never.
        min_steps: optimizer steps before which nothing stops the run.
        min_epochs: epochs before which nothing stops the run.
    """

    def __init__(
        self, control: ControlPlane, max_time: timedelta | None, min_steps: int | None, min_epochs: int | None
    ) -> None:
        self._control = control
        self._store = control.store
        self._max_time = max_time
        self._deadline = None if max_time is None else time.monotonic() + max_time.total_seconds()
        self._min_steps = min_steps or 0
        self._min_epochs = min_epochs or 0
        self._stop = StepAgreement(control, "stop")
        self._leave = StepAgreement(control, "leave")
        self._agreed = False
        self._late = False  # the time was up before anybody asked for anything
        self._point = 0  # how many were passed, the same on every rank
        self._look_at = 0
        self._looked: tuple[int, float] | None = None
        self._counted = 0  # how often ranks that had passed different numbers of points came together
        self._has_trained = False
        self._waits_long = True  # as the first window does, which may compile
        self.requested = False
        """Set to ask for a stop; ``trainer.should_stop``."""
        self.because: str | None = None
        """Why this rank asked first, in words."""
        self.signal = 0
        """Set to ask to leave: the number of the signal that wants it."""
        self.leaving = 0
        """The signal for whose sake all ranks leave now."""

    @property
    def goes_on_later(self) -> bool:
        """Whether the run ends before its time, so that what it has come to must be saved."""
        return self.leaving > 0 or (self._late if self._store is None else self._stop.why == _TIME_IS_UP)

    def ask(self, because: str) -> None:
        """Ask for a stop, and say why."""
        self.requested = True
        self.because = self.because or because

    @property
    def reason(self) -> str | None:
        """Why the ranks stop, by the first that asked; None where nobody did. Not collective."""
        if self._store is not None and self._store.check(["stop/because"]):
            return str(self._store.get("stop/because").decode())
        return self.because

    def after_window(self, step: int, epoch: int) -> bool:
        """Whether to stop now, in epoch ``epoch`` with ``step`` optimizer steps made. Called on every rank after each
        window, whether it made a step or not.
        """
        if self._deadline is not None:
            self._heed_deadline()
        if self._store is None:
            self.leaving = self.signal
            return self.leaving > 0 or (self.requested and self._may_stop(step, epoch))
        self._has_trained = True
        if self.requested and not self._stop.asked:
            self._leave_reason()
            self._stop.ask(self._point + 1, self._reason())
        if self.leaves_here():
            return True
        if not self._stop.is_kept(self._point):
            return False
        self.requested = True
        return self._may_stop(step, epoch)

    def leaves_here(self) -> bool:
        """Whether all ranks leave now. Called on every rank at each point.

        That is after a window, and after a micro-batch within a window or of an evaluation.
        """
        if self._store is None:
            self.leaving = self.signal
            return self.leaving > 0
        self._point = point = self._point + 1
        if self.signal and not self._leave.asked:
            self._leave.ask(point, self.signal)
        if point >= self._look_at:
            self._look(point)
        if not self._leave.is_kept(point):
            return False
        self.leaving = self._leave.why
        return True

    def agree(self, purpose: str) -> None:
        """Learn whether any rank asks for anything, where all ranks stand at the same point anyway."""
        self._heed_deadline()  # an epoch may close no window
        why = 0 if self._agreed or not self.requested else self._reason()
        if why:
            self._leave_reason()
        stops, leaves = self._stop.leave_word(why), self._leave.leave_word(self.signal)
        stopping, leaving = self._control.agree(purpose, self.requested or stops, leaves)
        if stopping and not self._agreed:
            self._stop.settle(stopping)
        self._leave.settle(leaving)
        self.requested = self._agreed = stopping > 0

    def agree_anew(self, purpose: str) -> None:
        """Learn whether any rank asks for anything, where points come in another rhythm from here on. Collective.

        What was agreed for a later point is due at once, and who asks from here on is heard soon.
        """
        self._looked, self._look_at = (self._point, -math.inf), self._point + 1
        self._publish(self._look_at)  # before anybody goes on, who may ask then
        self.agree(purpose)

    def come_together(self, purpose: str, *, alike: bool) -> None:
        """Learn whether any rank asks for anything, where one may be through before the others. Collective.

        Who asks meanwhile need not reckon with those that wait here: it leaves at a point of its own, and comes here.

        Args:
            purpose: what for, alike on every rank.
            alike: the ranks have passed the same number of points; else they count alike from here on.
        """
        self._publish(0)
        if alike or self._store is None:
            self.agree(purpose)
        else:
            self._point = self._furthest(purpose)
        self._looked, self._look_at = (self._point, -math.inf), self._point + 1
        self._publish(self._look_at)  # read too early, it does no harm: the next point is looked at

    def _furthest(self, purpose: str) -> int:
        store, rank = self._store, self._control.rank
        assert store is not None
        number, self._counted = self._counted, self._counted + 1
        store.set(f"points/{number}/{rank}", str(self._point))
        self.agree(purpose)
        if number > 1:  # which all have read by now
            store.delete_key(f"points/{number - 2}/{rank}")
        keys = [f"points/{number}/{each}" for each in range(self._control.world_size)]
        return max(map(int, store.multi_get(keys)))

    def leaves_together(self) -> bool:
        """Whether all ranks leave where they have just come together, as `agree` has found."""
        self.leaving = self._leave.why
        return self.leaving > 0

    def stay(self) -> None:
        """Not leave here after all, but at the next point. On all ranks."""
        self.leaving = 0

    def after_epoch(self, step: int, epochs: int) -> bool:
        """Whether to stop between epochs, as `agree` has found."""
        return self.leaves_together() or (self.requested and self._may_stop(step, epochs))

    def _may_stop(self, step: int, epochs: int) -> bool:
        return step >= self._min_steps and epochs >= self._min_epochs

    def _heed_deadline(self) -> None:
        if self._deadline is not None and not self.requested and time.monotonic() >= self._deadline:
            self._late = True
            self.ask(f"max_time={self._max_time} is up")

    def _leave_reason(self) -> None:
        if self._store is not None and self.because is not None:
            self._store.compare_set("stop/because", "", self.because)

    def _reason(self) -> int:
        return _TIME_IS_UP if self._late else 1

    def _publish(self, look_at: int) -> None:
        if self._store is not None:
            self._store.set(f"looks/{self._control.rank}", str(look_at))

    def _look(self, point: int) -> None:
        now, apart = time.monotonic(), 1
        if self._waits_long and self._has_trained:
            self._waits_long = False
            self._control.after_first_step()
        if self._looked is not None:
            before, then = self._looked
            # Where points are far apart it looks at each, and seldom where they are close.
            apart = min(AGREE_EVERY, max(1, int(_LOOK * (point - before) / max(now - then, 1e-9))))
        self._looked = point, now
        self._look_at = point + apart
        self._publish(self._look_at)
        self._leave.look()
        self._stop.look()


def limit_reached(max_epochs: int | None, max_steps: int, epoch: int, global_step: int) -> str | None:
    """Return which limit a run has come to; None where it may go on.

    Args:
        max_epochs: None or -1 for no limit.
        max_steps: -1 for no limit.
        epoch: epochs completed.
        global_step: optimizer steps made.
    """
    by_steps = 0 <= max_steps <= global_step
    by_epochs = max_epochs is not None and 0 <= max_epochs <= epoch
    if not by_steps:
        return f"max_epochs={max_epochs} is reached" if by_epochs else None
    return f"max_steps={max_steps} {f'and max_epochs={max_epochs} are' if by_epochs else 'is'} reached"


def how_it_ended(reasons: list[str], progress: Progress, nothing_left: bool, seconds: float) -> str:
    """Return the line that a run ends with.

    Args:
        reasons: what ended it: limits, then who asked for it.
        progress: how far it came.
        nothing_left: it went on from where it had ended before, and made no step.
        seconds: that it took.
    """
    epochs = f"{progress.epoch} epoch{'' if progress.epoch == 1 else 's'}"
    steps = f"{progress.global_step} optimizer step{'' if progress.global_step == 1 else 's'}"
    more = "; nothing was left to train" if nothing_left else f" after {_duration(seconds)}"
    return f"The run ended: {'; '.join(reasons) or 'there was nothing to train'} ({epochs}, {steps}){more}."


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
