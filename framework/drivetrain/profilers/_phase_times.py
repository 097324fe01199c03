"""PhaseTimes: measure a run's time by phase. Time counts only once, for the innermost open phase."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol

from drivetrain.errors import ConfigurationError


class Markers(Protocol):
    """Marks the beginnings and ends of phases on a device."""

    def begin(self, phase: Phase) -> Any:
        """Mark the beginning of a phase and return the mark."""

    def end(self, phase: Phase, mark: Any) -> None:
        """Mark the end of a phase that began at ``mark``."""


class Phase:
    """A phase within its parent phase. Times are in nanoseconds of the host's clock.

    Attributes:
        name: the name with which the phase was started.
        parent: the enclosing phase; None for the run.
        children: the phases within this phase, by name, in the order of their first start.
        calls: how often the phase was started.
        self_ns: the time without the time of the children.
        longest_ns: the time of the longest call, including children.
        device_ns: the device time between the marks of the phase's beginning and end; -1 without marks.
        began: when the last call began, in nanoseconds of `time.perf_counter_ns`.
        mark: the mark on the device at the beginning of the open call; None without marks.
    """

    __slots__ = ("began", "calls", "children", "device_ns", "longest_ns", "mark", "name", "parent", "self_ns")

    def __init__(self, name: str, parent: Phase | None) -> None:
        self.name = name
        self.parent = parent
        self.children: dict[str, Phase] = {}
        self.calls = 0
        self.self_ns = 0
        self.longest_ns = 0
        self.device_ns = -1
        self.began = 0
        self.mark: Any = None

    @property
    def total_ns(self) -> int:
        """The time including the time of the children."""
        return self.self_ns + sum(child.total_ns for child in self.children.values())

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Phase]]:
        """Yield this phase and its descendants with their paths. Siblings are ordered by time, the longest first."""
        yield path, self
        for child in sorted(self.children.values(), key=lambda phase: -phase.total_ns):
            yield from child.walk((*path, child.name))

    def time_in(self, names: Collection[str], excluded: Collection[str] = ()) -> int:
        """Return the total time of the outermost descendants that have one of the given names.

        Args:
            names: the names of phases to add up.
            excluded: the names of phases that are skipped with all their descendants.
        """
        total = 0
        for child in self.children.values():
            if child.name in names:
                total += child.total_ns
            elif child.name not in excluded:
                total += child.time_in(names, excluded)
        return total


class PhaseTimes:
    """Adds elapsed time to the innermost open phase, and the profiler's own time to `overhead_ns`.

    The times of all phases and `overhead_ns` add up to exactly the time from the beginning to the end of the run.

    Args:
        name: the name of the root phase, which is the run.
        markers: an object that records phases on a device, or None.
    """

    def __init__(self, name: str, markers: Markers | None = None) -> None:
        self.root = Phase(name, None)
        self.overhead_ns = 0
        self.overlapping: dict[str, list[int]] = {}
        """The calls and nanoseconds, by name, of phases that ended after their parent phase."""
        self.began = self._last = perf_counter_ns()
        self.ended: int | None = None
        """When the run ended, in nanoseconds of `time.perf_counter_ns`; None before the end."""
        self._top: Phase | None = self.root  # the innermost open phase; None after the end
        self._open_overlapping: dict[str, int] = {}  # start times of phases whose parent phase has ended, by name
        self._thread = get_ident()
        self._markers = markers
        self.root.calls = 1
        self.root.began = self.began

    @property
    def elapsed_ns(self) -> int:
        """The time from the beginning to the end or, during the run, to the last measurement."""
        return (self._last if self.ended is None else self.ended) - self.began

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is in the run's thread. Phases of other threads are ignored."""
        return get_ident() == self._thread

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the open phases below the root, outermost first."""
        names: list[str] = []
        phase = self._top
        while phase is not None and phase.parent is not None:
            names.append(phase.name)
            phase = phase.parent
        return tuple(reversed(names))

    @property
    def depth(self) -> int:
        """The number of open phases, including the root."""
        depth, phase = 0, self._top
        while phase is not None:
            depth, phase = depth + 1, phase.parent
        return depth

    def start(self, name: str) -> None:
        """Begin a phase within the innermost open phase. Calls from other threads are ignored."""
        now = perf_counter_ns()
        top = self._top
        if top is None or get_ident() != self._thread:
            return
        top.self_ns += now - self._last
        phase = top.children.get(name)
        if phase is None:
            phase = top.children[name] = Phase(name, top)
        phase.began = now
        phase.calls += 1
        self._top = phase
        if self._markers is not None:
            phase.mark = self._markers.begin(phase)
        self._last = end = perf_counter_ns()
        self.overhead_ns += end - now

    def stop(self, name: str) -> None:
        """End a phase and all open phases within it.

        Raises:
            ConfigurationError: the phase was not started.
        """
        now = perf_counter_ns()
        top = self._top
        if top is None or get_ident() != self._thread:
            return
        if top.name != name or top.parent is None:
            if name in self._open_overlapping:
                calls_and_time = self.overlapping.setdefault(name, [0, 0])
                calls_and_time[0] += 1
                calls_and_time[1] += now - self._open_overlapping.pop(name)
                return
            top = self._close_overlapping(top, name, now)
        self._close(top, now)
        self._last = end = perf_counter_ns()
        self.overhead_ns += end - now

    @contextmanager
    def overhead(self) -> Iterator[None]:
        """Context manager whose time counts as the profiler's overhead."""
        now = perf_counter_ns()
        if self._top is not None:
            self._top.self_ns += now - self._last
            self._last = now
        try:
            yield
        finally:
            if self._top is not None:
                self._last = end = perf_counter_ns()
                self.overhead_ns += end - now

    def end(self) -> None:
        """End the run and every open phase."""
        now = perf_counter_ns()
        while self._top is not None:
            self._close(self._top, now)
        self.ended = self._last

    def _close(self, phase: Phase, now: int) -> None:
        phase.self_ns += now - self._last
        self._last = now
        phase.longest_ns = max(phase.longest_ns, now - phase.began)
        if self._markers is not None:
            self._markers.end(phase, phase.mark)
            phase.mark = None
        self._top = phase.parent

    def _close_overlapping(self, top: Phase, name: str, now: int) -> Phase:
        """Close the open phases within the phase called ``name``, record that they continue, and return this phase."""
        phase: Phase | None = top
        while phase is not None and (phase.name != name or phase.parent is None):
            phase = phase.parent
        if phase is None:
            raise ConfigurationError(
                f"profiler.stop({name!r}) without a start.",
                "a phase must be started before it is stopped, in the same thread.",
                f"call profiler.start({name!r}), or write with profiler.profile({name!r}):.",
            )
        while top is not phase:
            self._open_overlapping[top.name] = top.began
            self._close(top, now)
            assert top.parent is not None
            top = top.parent
        return phase

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_markers": None, "_top": None}  # Only measurements that have ended are pickled.
