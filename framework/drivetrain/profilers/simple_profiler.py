"""SimpleProfiler: a table of the times of a run's phases, which add up to the run's time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from drivetrain.profilers._device_times import DeviceTimes
from drivetrain.profilers._phase_times import PhaseTimes
from drivetrain.profilers._recommendations import next_steps
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
        longest_ns: the time of the longest call; 0 for the other rows, such as "profiler".
        device_ns: the time on a CUDA device, measured by events; None if it was not measured.
    """

    path: tuple[str, ...]
    calls: int
    self_ns: int
    total_ns: int
    longest_ns: int
    device_ns: int | None = None


class SimpleProfiler(Profiler):
    """Measures each phase and hook by the host's clock, and prints a table at the end of the run.

    Time counts for the innermost open phase only, so that the sum of the column "self" is the run's time. The row
    "other" is the time outside of phases, and the row "profiler" is the profiler's own time.

    Args:
        dirpath: a folder or fsspec URL for the profiler's file; None for ``profile/`` in the run's folder.
        filename: the prefix of the file's name; None for ``<stage>-simple``.
        extended: whether to show the number of calls, their mean time and the longest call and, with several ranks, the
            times of the quickest and the slowest rank.
        device_times: whether to also measure the device time of phases on CUDA, with CUDA events and without
            synchronisation.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        extended: bool = True,
        device_times: bool = True,
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.device_times = device_times
        self._run = ProfiledRun("fit")
        self._times: PhaseTimes | None = None
        self._device: DeviceTimes | None = None
        self._uncounted_ns = 0.0  # nanoseconds per phase of the profiler's overhead that count for the phases
        self._results_by_rank: list[dict[str, int]] = []  # the result of `measured` of each rank

    def begin(self, run: ProfiledRun) -> None:
        """Discard earlier measurements and start the clock."""
        self._run, self._results_by_rank = run, []
        self._uncounted_ns = _uncounted_ns()
        self._device = DeviceTimes(run.device) if self.device_times and run.device.type == "cuda" else None
        self._times = PhaseTimes(run.stage, self._device)

    def start(self, phase: str) -> None:
        """Begin a phase. Before the first run, this method does nothing."""
        if self._times is not None:
            self._times.start(phase)

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: the phase was not started.
        """
        if self._times is not None:
            self._times.stop(phase)

    def end(self) -> None:
        """Stop the clock."""
        if self._times is not None:
            self._times.end()
        if self._device is not None:
            self._device.read(wait=True)
            self._device = None

    # The results of a run

    @property
    def total_ns(self) -> int:
        """The run's time in nanoseconds; 0 before the first run."""
        return 0 if self._times is None else self._times.elapsed_ns

    def rows(self) -> list[PhaseRow]:
        """Return the rows of the table: the phases, "other" and "profiler"."""
        times = self._times
        if times is None:
            return []
        rows = [
            PhaseRow(
                path or (OTHER,),
                phase.calls,
                phase.self_ns,
                phase.total_ns if path else phase.self_ns,
                phase.longest_ns if path else 0,
                phase.device_ns if path and phase.device_ns >= 0 else None,
            )
            for path, phase in times.root.walk()
        ]
        spans = sum(row.calls for row in rows) - 1
        return [*rows[1:], rows[0], PhaseRow((PROFILER_ROW,), spans, times.overhead_ns, times.overhead_ns, 0)]

    def measured(self) -> Mapping[str, int]:
        """Return the time of each phase without nested phases, by the path of the phase."""
        return {" > ".join(row.path): row.self_ns for row in self.rows()}

    def receive_results(self, measured: Sequence[Any]) -> None:
        """Receive the results of all ranks, for the columns of the quickest and the slowest rank."""
        self._results_by_rank = list(measured)

    def next_steps(self) -> list[str]:
        """Return at most three recommendations, each with the share of the time that the recommendation concerns."""
        return [] if self._times is None else next_steps(self._times.root, self._run)

    def summary(self) -> str:
        """Return the table and recommendations; "" before the first run."""
        times = self._times
        if times is None:
            return ""
        run, rows = self._run, self.rows()
        rank_text = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
        lines = [
            f"Profile of {run.stage} on {run.device}{rank_text}: {_seconds(times.elapsed_ns)} s by the host's clock"
        ]
        lines += _format_table([*rows, PhaseRow(("total",), 1, times.elapsed_ns, times.elapsed_ns, 0)], self)
        spans = rows[-1].calls
        lines.append(
            f"Measuring {spans} phases took the time in the row {PROFILER_ROW!r}, and about "
            f"{self._uncounted_ns * spans / 1e9:.6f} s for calls of the profiler, which the other rows include."
        )
        lines += _device_notes(run, self._device_was_timed())
        for name, (calls, time) in times.overlapping.items():
            lines.append(f"{name!r} ended after its parent phase {calls} times, with {_seconds(time)} s in total.")
        lines += [f"- {line}" for line in self.next_steps()]
        return "\n".join(lines)

    def _device_was_timed(self) -> bool:
        return any(row.device_ns is not None for row in self.rows())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_device": None}


def _uncounted_ns(rounds: int = 300) -> float:
    """Return the nanoseconds of overhead per phase that `PhaseTimes` cannot count as the profiler's own time."""
    profiler = SimpleProfiler()
    times = profiler._times = PhaseTimes("calibration")
    start, stop = profiler.start, profiler.stop

    def do_nothing(*args: Any, **options: Any) -> None:
        return None

    def do_nothing_profiled(*args: Any, **options: Any) -> None:
        start("nothing")
        try:
            return do_nothing(*args, **options)
        finally:
            stop("nothing")

    began = perf_counter_ns()
    for _ in range(rounds):
        do_nothing(None)
    between = perf_counter_ns()
    for _ in range(rounds):
        do_nothing_profiled(None)
    return max(0.0, (perf_counter_ns() - between - times.overhead_ns - (between - began)) / rounds)


def _device_notes(run: ProfiledRun, timed: bool) -> list[str]:
    if run.device.type == "cpu":
        return []
    device_column = ' The column "device" is the time on the device, measured by events.' if timed else ""
    return [
        f"The host does not wait for {run.device}: a phase's time is the time in which the host launches the work."
        f"{device_column} The host waits for the device in logging, in checkpoints, at the end of a validation, "
        "in the optimizer's step in fp16, and where your code reads a tensor (.item(), print)."
    ]


def _seconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e9:.6f}"


def _format_table(rows: Sequence[PhaseRow], profiler: SimpleProfiler) -> list[str]:
    """Return the lines of the table; the last row is the total."""
    total_ns = rows[-1].self_ns
    ranks = profiler._results_by_rank if len(profiler._results_by_rank) > 1 else []
    timed = profiler._device_was_timed()
    header = ["phase", "self s", "share", "total s"]
    header += ["calls", "mean s", "longest s"] if profiler.extended else []
    header += ["device s"] if timed else []
    header += ["quickest rank s", "slowest rank s"] if ranks and profiler.extended else []
    cells = [header]
    for row in rows:
        line = [
            "  " * (len(row.path) - 1) + row.path[-1],
            _seconds(row.self_ns),
            f"{row.self_ns / (total_ns or 1):.1%}",
        ]
        line.append(_seconds(row.total_ns))
        if profiler.extended:
            line += [
                str(row.calls),
                _seconds(row.total_ns / (row.calls or 1)),
                _seconds(row.longest_ns) if row.longest_ns else "",
            ]
        if timed:
            line.append("" if row.device_ns is None else _seconds(row.device_ns))
        if ranks and profiler.extended:
            line += _rank_extremes(row, ranks, profiler._run.rank)
        cells.append(line)
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]
    rule = "-" * len(lines[0])
    return [line.rstrip() for line in (lines[0], rule, *lines[1:-1], rule, lines[-1])]


def _rank_extremes(row: PhaseRow, ranks: Sequence[Mapping[str, int]], rank: int) -> list[str]:
    """Return the cells with the times of the quickest and the slowest rank, from the results of all ranks."""
    if row.path == ("total",):
        times = [sum(times_of_rank.values()) for times_of_rank in ranks]
    else:
        times = [times_of_rank.get(" > ".join(row.path), 0) for times_of_rank in ranks]
    times[rank] = row.self_ns
    return [_seconds(min(times)), _seconds(max(times))]
