"""PhaseTimes: measure a run's time by phase. Time counts only once, for the innermost open phase."""

from __future__ import annotations

from collections.abc import Iterator
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
        self.top: Phase | None = self.root if begins else None
        """The innermost open phase; None outside of a run."""
        self._thread = get_ident()
        self.root.calls = int(begins)
        self._began = self._last = perf_counter_ns()

    @property
    def elapsed_ns(self) -> int:
        """The time from the beginning to the end or, during the run, to the last measurement."""
        return self._last - self._began

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
        phase.calls += 1
        self.top = phase
        self._last = end = perf_counter_ns()
        self.overhead_ns += end - now

    def stop(self, name: str) -> None:
        """End a phase and all open phases within it.

        Raises:
            ConfigurationError: the phase is not open.
        """
        now = perf_counter_ns()
        top = phase = self.top
        if top is None or phase is None or get_ident() != self._thread:
            return
        while phase.parent is not None and phase.name != name:
            phase = phase.parent
        if phase.parent is None:
            raise ConfigurationError(
                f"profiler.stop({name!r}) without a start.",
                "a phase must be started before it is stopped, in the same thread and hook.",
                f"call profiler.start({name!r}), or write with profiler.profile({name!r}):.",
            )
        top.self_ns += now - self._last
        self.top = phase.parent
        self._last = end = perf_counter_ns()
        self.overhead_ns += end - now

    def end(self) -> None:
        """End the run and every open phase."""
        if self.top is not None:
            now = perf_counter_ns()
            self.top.self_ns += now - self._last
            self.top, self._last = None, now


class Phase:
    """A phase within its parent phase. Times are in nanoseconds of the host's clock.

    Attributes:
        name: the name with which the phase was started.
        parent: the enclosing phase; None for the run.
        children: the phases within this phase, by name, in the order of their first start.
        calls: how often the phase was started.
        self_ns: the time without the time of the children.
    """

    __slots__ = ("calls", "children", "name", "parent", "self_ns")

    def __init__(self, name: str, parent: Phase | None) -> None:
        self.name = name
        self.parent = parent
        self.children: dict[str, Phase] = {}
        self.calls = 0
        self.self_ns = 0

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
