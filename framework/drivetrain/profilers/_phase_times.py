"""PhaseTimes: measure a run's time by phase. Time counts only once, for the innermost open phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns

from drivetrain.errors import ConfigurationError


class PhaseTimes:
    """Adds elapsed time to the innermost open phase, and the profiler's own time to `overhead_ns`.

    The times of all phases and `overhead_ns` add up to exactly the time from the creation of this object to `end`.

    Args:
        begins: whether the run begins now. Otherwise, this object stands for no run, and measures nothing.
    """

    def __init__(self, begins: bool = True) -> None:
        self.root = Phase("", None)
        """The run. It has no call if this object stands for no run."""
        self.overhead_ns = 0
        self.outlasting: dict[str, list[int]] = {}
        """The calls and nanoseconds, by name, of phases that ended after their parent phase."""
        self.top: Phase | None = self.root if begins else None
        """The innermost open phase; None outside of a run."""
        self._cut_off: dict[str, int] = {}  # start times of phases that continue after their parent phase, by name
        self._thread = get_ident()
        self.root.calls = int(begins)
        self.root.began = self._last = perf_counter_ns()

    @property
    def elapsed_ns(self) -> int:
        """The time from the beginning to the end or, during the run, to the last measurement."""
        return self._last - self.root.began

    @property
    def is_measuring(self) -> bool:
        """Whether a run is measured and the caller is in its thread. Phases of other threads are ignored."""
        return self.top is not None and get_ident() == self._thread

    def start(self, name: str) -> None:
        """Begin a phase within the innermost open phase."""
        now = perf_counter_ns()
        top = self.top
        if top is None or get_ident() != self._thread:
            return
        top.self_ns += now - self._last
        phase = top.children.get(name)
        if phase is None:
            phase = top.children[name] = Phase(name, top)
        phase.began = now
        phase.calls += 1
        self.top = phase
        self._last = end = perf_counter_ns()
        self.overhead_ns += end - now

    def stop(self, name: str) -> None:
        """End a phase and all open phases within it.

        Raises:
            ConfigurationError: the phase was not started.
        """
        now = perf_counter_ns()
        phase = self.top
        if phase is None or get_ident() != self._thread:
            return
        while phase.parent is not None and phase.name != name:
            phase = phase.parent
        if phase.parent is None:
            self._stop_outlasting(name, now)
            return
        self._close(phase, now)
        self._last = end = perf_counter_ns()
        self.overhead_ns += end - now

    @contextmanager
    def overhead(self) -> Iterator[None]:
        """Context manager whose time counts as the profiler's overhead."""
        now = perf_counter_ns()
        if self.top is not None:
            self.top.self_ns += now - self._last
        yield
        if self.top is not None:
            self._last = end = perf_counter_ns()
            self.overhead_ns += end - now

    def end(self) -> None:
        """End the run and every open phase."""
        if self.top is not None:
            self._close(self.root, perf_counter_ns())

    def _close(self, last: Phase, now: int) -> None:
        """Close the open phases from the innermost one to ``last``."""
        while self.top is not last.parent:
            phase = self.top
            assert phase is not None
            if phase is not last:
                self._cut_off[phase.name] = phase.began
            phase.self_ns += now - self._last
            self._last = now
            phase.longest_ns = max(phase.longest_ns, now - phase.began)
            self.top = phase.parent

    def _stop_outlasting(self, name: str, now: int) -> None:
        """Record the time of a phase whose parent phase has ended."""
        if name not in self._cut_off:
            raise ConfigurationError(
                f"profiler.stop({name!r}) without a start.",
                "a phase must be started before it is stopped, in the same thread.",
                f"call profiler.start({name!r}), or write with profiler.profile({name!r}):.",
            )
        calls_and_time = self.outlasting.setdefault(name, [0, 0])
        calls_and_time[0] += 1
        calls_and_time[1] += now - self._cut_off.pop(name)


class Phase:
    """A phase within its parent phase. Times are in nanoseconds of the host's clock.

    Attributes:
        name: the name with which the phase was started.
        parent: the enclosing phase; None for the run.
        children: the phases within this phase, by name, in the order of their first start.
        calls: how often the phase was started.
        self_ns: the time without the time of the children.
        longest_ns: the time of the longest call, including children.
        began: when the last call began, in nanoseconds of `time.perf_counter_ns`.
    """

    __slots__ = ("began", "calls", "children", "longest_ns", "name", "parent", "self_ns")

    def __init__(self, name: str, parent: Phase | None) -> None:
        self.name = name
        self.parent = parent
        self.children: dict[str, Phase] = {}
        self.calls = 0
        self.self_ns = 0
        self.longest_ns = 0
        self.began = 0

    @property
    def total_ns(self) -> int:
        """The time including the time of the children."""
        return self.self_ns + sum(child.total_ns for child in self.children.values())

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the enclosing phases below the run and of this phase; empty for the run."""
        return () if self.parent is None else (*self.parent.path, self.name)

    def walk(self) -> Iterator[Phase]:
        """Yield this phase and its descendants. Siblings are ordered by time, the longest first."""
        yield self
        for child in sorted(self.children.values(), key=lambda phase: -phase.total_ns):
            yield from child.walk()
