"""Outcomes of faults, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from striking import Fault


@dataclass
class Outcome:
    """The outcome of a fault.

    Attributes:
        strategy: the strategy of the run.
        run: the number of the run.
        fault: the fault.
        waited: seconds until every process had ended; None if the run continued.
        lost: steps that the next start had to repeat.
        survived: whether the run had the results of the undisturbed one.
    """

    strategy: str
    run: int
    fault: Fault
    waited: float | None = None
    lost: int = 0
    survived: bool = False


@dataclass
class Tally:
    """The outcomes of the faults in the runs of one strategy."""

    outcomes: list[Outcome] = field(default_factory=list)
    runs: int = 0
    resumes: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    """The runs that did not stand what struck them, and how that showed."""

    def add(self, other: Tally) -> None:
        """Add the outcomes of another tally."""
        self.outcomes += other.outcomes
        self.runs += other.runs
        self.resumes += other.resumes
        self.failed |= other.failed

    def waits(self, of: str | None = None) -> list[float]:
        """Return the seconds from a fault to the end of every process, for one kind or for all."""
        return [one.waited for one in self.outcomes if one.waited is not None and of in (None, one.fault.kind)]


def table(tallies: Sequence[Tally]) -> str:
    """Return tables by kind and by strategy, and the places at which exceptions were raised."""
    outcomes = [outcome for tally in tallies for outcome in tally.outcomes]
    if not outcomes:
        return "nothing was tried"
    lines = ["kind | tried | survived | steps lost at most | fault to end of every process: median | longest"]
    lines += _rows(outcomes, kind)
    lines += ["", lines[0].replace("kind", "strategy", 1), *_rows(outcomes, lambda one: one.strategy)]
    lines += [_row("all", outcomes), ""]
    raised = sorted({one.fault.place for one in outcomes if one.fault.kind == "raises"})
    lines += [f"exceptions were raised at {len(raised)} places: {', '.join(raised)}"]
    runs, resumes = sum(tally.runs for tally in tallies), sum(tally.resumes for tally in tallies)
    lines += [f"{runs} runs, {resumes} starts went on from a checkpoint"]
    return "\n".join(lines)


def kind(outcome: Outcome) -> str:
    """Return the name of the fault's kind in a table."""
    within = outcome.fault.kind == "killed" and outcome.fault.place == "writing"
    return "killed in a save" if within else outcome.fault.kind


def _rows(outcomes: list[Outcome], key: Callable[[Outcome], str]) -> list[str]:
    names = list(dict.fromkeys(key(one) for one in outcomes))
    return [_row(name, [one for one in outcomes if key(one) == name]) for name in names]


def _row(name: str, outcomes: list[Outcome]) -> str:
    waits = [one.waited for one in outcomes if one.waited is not None]
    times = [f"{statistics.median(waits):.1f} s", f"{max(waits):.1f} s"] if waits else ["-", "-"]
    lost = max(one.lost for one in outcomes)
    return " | ".join([name, str(len(outcomes)), str(sum(one.survived for one in outcomes)), str(lost), *times])
