"""Phase: a phase of a run within its parent phase, with its times."""

from __future__ import annotations

from collections.abc import Iterator


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
