"""SimpleProfiler: a table of a run's time by phase, which adds up to the run's time."""

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
OWN = "profiler"


class PhaseRow(NamedTuple):
    """A row of the table. Times are in nanoseconds.

    Attributes:
        path: the phase and those around it, the outermost first: ``("training", "validation", "forward")``.
        calls: how often it was started.
        self_ns: time in it that is in no phase within it. Over all rows it adds up to the run's time.
        total_ns: with the phases within it.
        longest_ns: the longest call; 0 where the row is no phase.
        device_ns: what a CUDA device took, by events; None where nothing was measured.
    """

    path: tuple[str, ...]
    calls: int
    self_ns: int
    total_ns: int
    longest_ns: int
    device_ns: int | None = None


class SimpleProfiler(Profiler):
    """Times each phase and hook by the host's clock, and prints a table at the end of the run.

    Each moment is counted in the innermost phase that is open, so that the column "self" adds up to the run's time;
    what is in no phase is the row "other", and what the profiler itself takes is the row "profiler".

    Args:
        dirpath: a folder or fsspec URL for its file; None for ``profile/`` in the run's folder.
        filename: what its name begins with; None for ``<stage>-simple``.
        extended: show calls, means and longest calls; and with several ranks what the quickest and the slowest took.
        device_times: on CUDA, time what phases give to the device as well, by an event at each beginning and end, for
            which nothing waits. False leaves them out.
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
        self._uncounted = 0.0
        self._ranks: list[dict[str, int]] = []

    def begin(self, run: ProfiledRun) -> None:
        """Forget what was measured before, and start the clock."""
        self._run, self._ranks = run, []
        self._uncounted = _uncounted()
        self._device = DeviceTimes(run.device) if self.device_times and run.device.type == "cuda" else None
        self._times = PhaseTimes(run.stage, self._device)

    def start(self, phase: str) -> None:
        """Begin a phase; outside of a run nothing happens."""
        if self._times is not None:
            self._times.start(phase)

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: it was not begun.
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

    # What was measured

    @property
    def total_ns(self) -> int:
        """The run's time in nanoseconds; 0 before there was one."""
        return 0 if self._times is None else self._times.whole_ns

    def rows(self) -> list[PhaseRow]:
        """Return the rows of the table: phases, "other" and "profiler"."""
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
        return [*rows[1:], rows[0], PhaseRow((OWN,), spans, times.own_ns, times.own_ns, 0)]

    def measured(self) -> Mapping[str, int]:
        """Return the time in each phase, its children not counted, by its path."""
        return {" > ".join(row.path): row.self_ns for row in self.rows()}

    def take_ranks(self, measured: Sequence[Any]) -> None:
        """Take what the ranks measured, for the columns of the quickest and the slowest."""
        self._ranks = list(measured)

    def next_steps(self) -> list[str]:
        """Return what to do next, in three lines at most, each with the share of the time that it comes from."""
        return [] if self._times is None else next_steps(self._times.root, self._run)

    def summary(self) -> str:
        """Return the table, and what to do next; "" before there was a run."""
        times = self._times
        if times is None:
            return ""
        run, rows = self._run, self.rows()
        among = f", rank {run.rank} of {run.world_size}" if run.world_size > 1 else ""
        lines = [f"Profile of {run.stage} on {run.device}{among}: {_in_s(times.whole_ns)} s by the host's clock"]
        lines += _table([*rows, PhaseRow(("total",), 1, times.whole_ns, times.whole_ns, 0)], self)
        spans = rows[-1].calls
        lines.append(
            f"Measuring {spans} phases took what the row {OWN!r} says, and about {self._uncounted * spans / 1e9:.6f} s "
            "more, for calls, that lie in the other rows."
        )
        lines += _about_device(run, self._device_was_timed())
        for name, (calls, time) in times.across.items():
            lines.append(f"{name!r} went on after the phase that it began in: {calls} times, {_in_s(time)} s in all.")
        lines += [f"- {line}" for line in self.next_steps()]
        return "\n".join(lines)

    def _device_was_timed(self) -> bool:
        return any(row.device_ns is not None for row in self.rows())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_device": None}


def _uncounted(rounds: int = 300) -> float:
    """Return the nanoseconds that a phase takes beyond what is counted as the profiler's own, measured here and now."""
    profiler = SimpleProfiler()
    times = profiler._times = PhaseTimes("calibration")
    start, stop = profiler.start, profiler.stop

    def nothing(*args: Any, **options: Any) -> None:
        return None

    def spanned(*args: Any, **options: Any) -> None:
        start("nothing")
        try:
            return nothing(*args, **options)
        finally:
            stop("nothing")

    began = perf_counter_ns()
    for _ in range(rounds):
        nothing(None)
    between = perf_counter_ns()
    for _ in range(rounds):
        spanned(None)
    return max(0.0, (perf_counter_ns() - between - times.own_ns - (between - began)) / rounds)


def _about_device(run: ProfiledRun, timed: bool) -> list[str]:
    if run.device.type == "cpu":
        return []
    beside = ' The column "device" is what the device took, by events.' if timed else ""
    return [
        f"The host does not wait for {run.device}: a phase's time is what the host took to give it work.{beside} "
        "Device work is waited for in: logging, checkpoint, the end of a validation, an optimizer's step in fp16, and "
        "wherever your code reads a tensor (.item(), print)."
    ]


def _in_s(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e9:.6f}"


def _table(rows: Sequence[PhaseRow], profiler: SimpleProfiler) -> list[str]:
    """Lay rows out in columns; the last is the total of all."""
    whole = rows[-1].self_ns
    ranks = profiler._ranks if len(profiler._ranks) > 1 else []
    timed = profiler._device_was_timed()
    head = ["phase", "self s", "share", "total s"]
    head += ["calls", "mean s", "longest s"] if profiler.extended else []
    head += ["device s"] if timed else []
    head += ["quickest rank s", "slowest rank s"] if ranks and profiler.extended else []
    cells = [head]
    for row in rows:
        line = ["  " * (len(row.path) - 1) + row.path[-1], _in_s(row.self_ns), f"{row.self_ns / (whole or 1):.1%}"]
        line.append(_in_s(row.total_ns))
        if profiler.extended:
            line += [
                str(row.calls),
                _in_s(row.total_ns / (row.calls or 1)),
                _in_s(row.longest_ns) if row.longest_ns else "",
            ]
        if timed:
            line.append("" if row.device_ns is None else _in_s(row.device_ns))
        if ranks and profiler.extended:
            line += _over_ranks(row, ranks, profiler._run.rank)
        cells.append(line)
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    laid = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]
    rule = "-" * len(laid[0])
    return [line.rstrip() for line in (laid[0], rule, *laid[1:-1], rule, laid[-1])]


def _over_ranks(row: PhaseRow, ranks: Sequence[Mapping[str, int]], own: int) -> list[str]:
    """What the quickest and the slowest rank took, as far as the others had come when they told."""
    if row.path == ("total",):
        found = [sum(one.values()) for one in ranks]
    else:
        found = [one.get(" > ".join(row.path), 0) for one in ranks]
    found[own] = row.self_ns
    return [_in_s(min(found)), _in_s(max(found))]
