"""AdvancedProfiler: which functions each phase of a run spends its time in, by cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.profilers._atomic_publish import publish
from drivetrain.profilers._phase_times import PhaseTimes
from drivetrain.profilers._recommendations import next_steps
from drivetrain.profilers.profiler import ProfiledRun, Profiler

OTHER = "other"
_MOST_SHOWN = 8
"""Phases whose functions are printed; the file has all."""


class AdvancedProfiler(Profiler):
    """Profiles every Python function by phase; slows the run down by half and more.

    A function's time is counted in the innermost phase that is open, so that nothing is counted twice.

    Args:
        dirpath: a folder or fsspec URL for its files; None for ``profile/`` in the run's folder.
        filename: what their names begin with; None for ``<stage>-advanced``.
        line_count_restriction: how many of each phase's functions are shown: an int counts them, a float is a part.
        dump_stats: write each phase's statistics as well, for `pstats.Stats` and for viewers such as snakeviz.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 20,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._run = ProfiledRun("fit")
        self._times: PhaseTimes | None = None
        self._open: list[cProfile.Profile] = []
        self._profiles: dict[str, cProfile.Profile] = {}
        self._stats: dict[str, pstats.Stats] = {}

    def begin(self, run: ProfiledRun) -> None:
        """Forget what was measured before, and begin.

        Raises:
            ConfigurationError: another profiler watches this thread.
        """
        if sys.getprofile() is not None:
            raise ConfigurationError(
                f"profiler='advanced' while {type(sys.getprofile()).__name__} watches this thread.",
                "Python calls one profiler at a time.",
                "end the other one, or use profiler='simple'.",
            )
        self._run = run
        self._times = PhaseTimes(run.stage)
        self._profiles, self._stats, self._open = {}, {}, []
        self._enter()

    def start(self, phase: str) -> None:
        """Begin a phase: functions are counted in it from here on."""
        if self._times is None or not self._open or not self._times.is_own_thread:
            return
        self._open[-1].disable()
        self._times.start(phase)
        self._enter()

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: it was not begun.
        """
        if self._times is None or not self._open or not self._times.is_own_thread:
            return
        self._open[-1].disable()
        try:
            self._times.stop(phase)
        finally:
            del self._open[self._times.depth :]
            self._open[-1].enable()

    def end(self) -> None:
        """End the run."""
        if self._open:
            self._open[-1].disable()
            self._open.clear()
        if self._times is not None:
            self._times.end()
        self._stats = {name: pstats.Stats(profile) for name, profile in self._profiles.items() if _has_entries(profile)}
        self._profiles = {}

    def summary(self) -> str:
        """Return the functions of the phases that took longest, and what to do next."""
        return self._text(_MOST_SHOWN)

    def _text(self, most: int | None) -> str:
        if self._times is None:
            return ""
        ordered = sorted(self._stats.items(), key=lambda item: -_seconds_of(item[1]))
        parts = [f"Profile of {name}\n{self._functions(stats)}" for name, stats in ordered[:most]]
        if most is not None and len(ordered) > most:
            parts.append(f"{len(ordered) - most} more phases are in the file.")
        parts.append("\n".join(f"- {line}" for line in next_steps(self._times.root, self._run)))
        return "\n\n".join(part for part in parts if part)

    def _functions(self, stats: pstats.Stats) -> str:
        stream = io.StringIO()
        before, stats.stream = stats.stream, stream  # type: ignore[attr-defined]
        try:
            stats.sort_stats("cumulative").print_stats(self.line_count_restriction)
        finally:
            stats.stream = before  # type: ignore[attr-defined]
        return stream.getvalue().strip()

    def write(self, folder: str, name: str) -> list[str]:
        """Write the functions of all phases, and each phase's statistics where ``dump_stats``."""
        written = [publish(folder, f"{name}.txt", self._text(None).encode())]
        if self.dump_stats:
            for phase, stats in self._stats.items():
                written.append(_publish_stats(stats, folder, f"{name}-{_as_name(phase)}.prof"))
        return written

    def _enter(self) -> None:
        assert self._times is not None
        phase = " > ".join(self._times.path) or OTHER
        profile = self._profiles.get(phase)
        if profile is None:
            profile = self._profiles[phase] = cProfile.Profile()
        try:
            profile.enable()
        except ValueError as error:  # from Python 3.12 on, of another one that is active
            raise ConfigurationError(
                "profiler='advanced' while another profiler watches this process.",
                "Python calls one profiler at a time.",
                "end the other one, or use profiler='simple'.",
            ) from error
        self._open.append(profile)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": [], "_profiles": {}, "_stats": {}}


def _seconds_of(stats: pstats.Stats) -> float:
    found: float = stats.total_tt  # type: ignore[attr-defined]
    return found


def _has_entries(profile: cProfile.Profile) -> bool:
    entries: Sequence[Any] = profile.getstats()
    return bool(entries)


def _publish_stats(stats: pstats.Stats, folder: str, name: str) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, name)
        stats.dump_stats(path)
        return publish(folder, name, path)


def _as_name(phase: str) -> str:
    """A phase as a part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in phase)
