"""PhaseTimes: a run's time by phase. Each moment is counted once, in the innermost phase that is open."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol

from drivetrain.errors import ConfigurationError


class Markers(Protocol):
    """Marks where phases begin and end on a device."""

    def begin(self, phase: Phase) -> Any: ...

    def end(self, phase: Phase, mark: Any) -> None: ...


class Phase:
    """One phase within the phase around it. Times are in nanoseconds of the host's clock.

    Attributes:
        name: as it was started.
        parent: the phase around it; None for the run.
        children: phases within it, by name, in the order in which they first came.
        calls: how often it was started.
        self_ns: time in it that is in none of its children.
        longest_ns: the longest call, children included.
        device_ns: what a device took between its marks; -1 where nothing was marked.
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
        """Time in it and in its children."""
        return self.self_ns + sum(child.total_ns for child in self.children.values())

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Phase]]:
        """Return it and all within it, each with its path; of siblings, the longest first."""
        yield path, self
        for child in sorted(self.children.values(), key=lambda one: -one.total_ns):
            yield from child.walk((*path, child.name))

    def within(self, names: Collection[str], but: Collection[str] = ()) -> int:
        """Return the time in phases called one of ``names``, the outermost below this one.

        Args:
            names: which.
            but: phases that are not looked into.
        """
        total = 0
        for child in self.children.values():
            if child.name in names:
                total += child.total_ns
            elif child.name not in but:
                total += child.within(names, but)
        return total


class PhaseTimes:
    """Counts the time between two moments in the innermost open phase, and its own in `own_ns`.

    So the sum over all phases and `own_ns` is the time from the beginning to the end, to the nanosecond.

    Args:
        name: of the run, the phase around all.
        markers: mark phases on a device; None for none.
    """

    def __init__(self, name: str, markers: Markers | None = None) -> None:
        self.root = Phase(name, None)
        self.own_ns = 0
        self.across: dict[str, list[int]] = {}
        """Calls and nanoseconds of phases that outlasted the phase that they began in; they overlap others."""
        self.began = self._last = perf_counter_ns()
        self.ended: int | None = None
        self._top: Phase | None = self.root
        self._outlasting: dict[str, int] = {}
        self._thread = get_ident()
        self._markers = markers
        self.root.calls = 1
        self.root.began = self.began

    @property
    def whole_ns(self) -> int:
        """From the beginning to the end, or until now."""
        return (self._last if self.ended is None else self.ended) - self.began

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread of the run, whose phases alone are counted."""
        return get_ident() == self._thread

    @property
    def path(self) -> tuple[str, ...]:
        """The open phases within the run, the outermost first."""
        found: list[str] = []
        phase = self._top
        while phase is not None and phase.parent is not None:
            found.append(phase.name)
            phase = phase.parent
        return tuple(reversed(found))

    @property
    def depth(self) -> int:
        """How many phases are open, the run included."""
        depth, phase = 0, self._top
        while phase is not None:
            depth, phase = depth + 1, phase.parent
        return depth

    def start(self, name: str) -> None:
        """Begin a phase within the one that is open. Other threads than the run's are left alone."""
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
        self.own_ns += end - now

    def stop(self, name: str) -> None:
        """End a phase, and with it those that were begun in it and not ended.

        Raises:
            ConfigurationError: it was not begun.
        """
        now = perf_counter_ns()
        top = self._top
        if top is None or get_ident() != self._thread:
            return
        if top.name != name or top.parent is None:
            if name in self._outlasting:
                calls_and_time = self.across.setdefault(name, [0, 0])
                calls_and_time[0] += 1
                calls_and_time[1] += now - self._outlasting.pop(name)
                return
            top = self._outlast(top, name, now)
        self._close(top, now)
        self._last = end = perf_counter_ns()
        self.own_ns += end - now

    @contextmanager
    def own_time(self) -> Iterator[None]:
        """Count what is done within it as the profiler's own, and in no phase."""
        now = perf_counter_ns()
        if self._top is not None:
            self._top.self_ns += now - self._last
            self._last = now
        try:
            yield
        finally:
            if self._top is not None:
                self._last = end = perf_counter_ns()
                self.own_ns += end - now

    def end(self) -> None:
        """End the run, and every phase that is open."""
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

    def _outlast(self, top: Phase, name: str, now: int) -> Phase:
        """Close what was begun within phase ``name`` and goes on after it."""
        phase: Phase | None = top
        while phase is not None and (phase.name != name or phase.parent is None):
            phase = phase.parent
        if phase is None:
            raise ConfigurationError(
                f"profiler.stop({name!r}) without a start.",
                "what is stopped must have been started before, in the same thread.",
                f"call profiler.start({name!r}), or write with profiler.profile({name!r}):.",
            )
        while top is not phase:
            self._outlasting[top.name] = top.began
            self._close(top, now)
            assert top.parent is not None
            top = top.parent
        return phase

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_markers": None, "_top": None}  # one that is over can be sent elsewhere
