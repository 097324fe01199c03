"""AdvancedProfiler: profile the functions of each phase of a run by cProfile."""

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
_MAX_PHASES = 8
"""The number of phases whose functions are printed. The file contains the functions of all phases."""


class AdvancedProfiler(Profiler):
    """Profiles every Python function by phase. The profiler can more than double the time of a short step.

    A function's time counts for the innermost open phase, so that no time is counted twice.

    Args:
        dirpath: a folder or fsspec URL for the profiler's files; None for ``profile/`` in the run's folder.
        filename: the prefix of the files' names; None for ``<stage>-advanced``.
        line_count_restriction: how many of each phase's functions are shown. An int is a number of functions, and a
            float is a fraction of the functions.
        dump_stats: whether to also write each phase's statistics, for `pstats.Stats` and viewers such as snakeviz.
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
        self._open: list[cProfile.Profile] = []  # the profiles of the open phases; only the last is enabled
        self._profiles: dict[str, cProfile.Profile] = {}
        self._stats: dict[str, pstats.Stats] = {}

    def begin(self, run: ProfiledRun) -> None:
        """Discard earlier measurements and start to profile a run.

        Raises:
            ConfigurationError: another profiler is active in this thread.
        """
        if sys.getprofile() is not None:
            raise ConfigurationError(
                f"profiler='advanced' while {type(sys.getprofile()).__name__} is active in this thread.",
                "Python supports one profiler at a time.",
                "stop the other one, or use profiler='simple'.",
            )
        self._run = run
        self._times = PhaseTimes(run.stage)
        self._profiles, self._stats, self._open = {}, {}, []
        self._enter()

    def start(self, phase: str) -> None:
        """Begin a phase. From now on, time in functions counts for this phase."""
        if self._times is None or not self._open or not self._times.is_own_thread:
            return
        self._open[-1].disable()
        self._times.start(phase)
        self._enter()

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: the phase was not started.
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
        """Return the functions of the longest phases, and recommendations."""
        return self._text(_MAX_PHASES)

    def _text(self, limit: int | None) -> str:
        if self._times is None:
            return ""
        ordered = sorted(self._stats.items(), key=lambda item: -_total_seconds(item[1]))
        parts = [f"Profile of {name}\n{self._functions(stats)}" for name, stats in ordered[:limit]]
        if limit is not None and len(ordered) > limit:
            parts.append(f"The profile's file contains {len(ordered) - limit} more phases.")
        parts.append("\n".join(f"- {line}" for line in next_steps(self._times.root, self._run)))
        return "\n\n".join(part for part in parts if part)

    def _functions(self, stats: pstats.Stats) -> str:
        stream = io.StringIO()
        previous_stream, stats.stream = stats.stream, stream  # type: ignore[attr-defined]
        try:
            stats.sort_stats("cumulative").print_stats(self.line_count_restriction)
        finally:
            stats.stream = previous_stream  # type: ignore[attr-defined]
        return stream.getvalue().strip()

    def write(self, folder: str, name: str) -> list[str]:
        """Write the functions of all phases and, with ``dump_stats``, each phase's statistics."""
        written = [publish(folder, f"{name}.txt", self._text(None).encode())]
        if self.dump_stats:
            for phase, stats in self._stats.items():
                written.append(_publish_stats(stats, folder, f"{name}-{_file_name_part(phase)}.prof"))
        return written

    def _enter(self) -> None:
        assert self._times is not None
        phase = " > ".join(self._times.path) or OTHER
        profile = self._profiles.get(phase)
        if profile is None:
            profile = self._profiles[phase] = cProfile.Profile()
        try:
            profile.enable()
        except ValueError as error:  # From Python 3.12 on, this means that another profiler is active.
            raise ConfigurationError(
                "profiler='advanced' while another profiler is active in this process.",
                "Python supports one profiler at a time.",
                "stop the other one, or use profiler='simple'.",
            ) from error
        self._open.append(profile)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": [], "_profiles": {}, "_stats": {}}


def _total_seconds(stats: pstats.Stats) -> float:
    seconds: float = stats.total_tt  # type: ignore[attr-defined]
    return seconds


def _has_entries(profile: cProfile.Profile) -> bool:
    entries: Sequence[Any] = profile.getstats()
    return bool(entries)


def _publish_stats(stats: pstats.Stats, folder: str, name: str) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, name)
        stats.dump_stats(path)
        return publish(folder, name, path)


def _file_name_part(phase: str) -> str:
    """Return a phase's name in a form that is safe in a file name."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in phase)
