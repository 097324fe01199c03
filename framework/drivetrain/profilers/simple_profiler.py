"""SimpleProfiler: a table of the times of a run's phases, which add up to the run's time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from drivetrain.profilers._phase_times import PhaseTimes
from drivetrain.profilers.profiler import ProfiledRun, Profiler

OTHER = "other"
PROFILER_ROW = "profiler"


class PhaseRow(NamedTuple):
    """A row of the table. Times are in nanoseconds.

    Attributes:
        path: the names of the enclosing phases and of the phase, such as ``("training", "validation", "forward")``.
        calls: how often the phase was started.
        self_ns: the time without the time of nested phases. The sum over all rows is the run's time.
        total_ns: the time including nested phases.
    """

    path: tuple[str, ...]
    calls: int
    self_ns: int
    total_ns: int


class SimpleProfiler(Profiler):
    """Measures each phase and hook by the host's clock, and prints a table at the end of the run.

    Time counts for the innermost open phase only, so that the sum of the column "self" is the run's time. The row
    "other" is the time outside of phases, and the row "profiler" is the profiler's own time.

    Args:
        dirpath: a folder or fsspec URL for the profiler's file; None for ``profile/`` in the run's folder.
        filename: the prefix of the file's name; None for ``<stage>-simple``.
        extended: whether to show the number of calls and their mean time.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self._run = ProfiledRun("fit")
        self._times = PhaseTimes(begins=False)

    def begin(self, run: ProfiledRun) -> None:
        """Discard earlier measurements and start the clock."""
        self._run = run
        self._times = PhaseTimes()

    def start(self, phase: str) -> None:
        """Begin a phase. Before the first run, this method does nothing."""
        self._times.start(phase)

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: the phase is not open.
        """
        self._times.stop(phase)

    def end(self) -> None:
        """Stop the clock."""
        self._times.end()

    # The results of a run

    @property
    def total_ns(self) -> int:
        """The run's time in nanoseconds; 0 before the first run."""
        return self._times.elapsed_ns

    def rows(self) -> list[PhaseRow]:
        """Return the rows of the table: the phases, "other" and "profiler"."""
        times = self._times
        if not times.root.calls:
            return []
        run, *phases = times.root.walk()
        spans = sum(phase.calls for phase in phases)
        return [
            *(PhaseRow(phase.path, phase.calls, phase.self_ns, phase.total_ns) for phase in phases),
            PhaseRow((OTHER,), run.calls, run.self_ns, run.self_ns),
            PhaseRow((PROFILER_ROW,), spans, times.overhead_ns, times.overhead_ns),
        ]

    def summary(self) -> str:
        """Return the table; "" before the first run."""
        times = self._times
        if not times.root.calls:
            return ""
        run = self._run
        rank_text = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
        title = f"Profile of {run.stage} on {run.device}{rank_text}: {_seconds(times.elapsed_ns)} s by the host's clock"
        table = self._table([*self.rows(), PhaseRow(("total",), 1, times.elapsed_ns, times.elapsed_ns)])
        return "\n".join([title, *table])

    def _table(self, rows: Sequence[PhaseRow]) -> list[str]:
        """Return the lines of the table; the last row is the total."""
        columns: dict[str, Callable[[PhaseRow], str]] = {
            "self s": lambda row: _seconds(row.self_ns),
            "share": lambda row: f"{row.self_ns / (rows[-1].self_ns or 1):.1%}",
            "total s": lambda row: _seconds(row.total_ns),
        }
        if self.extended:
            columns["calls"] = lambda row: str(row.calls)
            columns["mean s"] = lambda row: _seconds(row.total_ns / (row.calls or 1))
        names = ["phase", *("  " * (len(row.path) - 1) + row.path[-1] for row in rows)]
        table = [_padded(names, str.ljust)]
        table += [_padded([header, *map(cell, rows)], str.rjust) for header, cell in columns.items()]
        lines = ["  ".join(line) for line in zip(*table, strict=True)]
        rule = "-" * len(lines[0])
        return [line.rstrip() for line in (lines[0], rule, *lines[1:-1], rule, lines[-1])]


def _seconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e9:.6f}"


def _padded(cells: Sequence[str], pad: Callable[[str, int], str]) -> list[str]:
    """Return the cells of a column, all as wide as the widest."""
    width = max(map(len, cells))
    return [pad(cell, width) for cell in cells]
