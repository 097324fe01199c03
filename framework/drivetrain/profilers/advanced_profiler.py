"""AdvancedProfiler: profile the functions of each phase of a run by cProfile."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from collections.abc import Callable
from typing import Any

from drivetrain._storage.paths import publish_export
from drivetrain.profilers._phase_times import Phase, PhaseTimes
from drivetrain.profilers.profiler import ProfiledRun, Profiler

OTHER = "other"


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
        self._times = PhaseTimes(begins=False)
        self._profiles: dict[Phase, cProfile.Profile] = {}  # only that of the innermost open phase is enabled
        self._stats: dict[str, pstats.Stats] = {}

    def begin(self, run: ProfiledRun) -> None:
        """Discard earlier measurements and start to profile a run.

        Raises:
            ValueError: from Python 3.12 on, another profiler is active.
        """
        self._times = PhaseTimes()
        self._profiles, self._stats = {}, {}
        self._enable()

    def start(self, phase: str) -> None:
        """Begin a phase. From now on, time in functions counts for this phase."""
        self._change(self._times.start, phase)

    def stop(self, phase: str) -> None:
        """End a phase.

        Raises:
            ConfigurationError: the phase is not open.
        """
        self._change(self._times.stop, phase)

    def end(self) -> None:
        """End the run."""
        self._disable()
        self._times.end()
        profiles = {" > ".join(phase.path) or OTHER: profile for phase, profile in self._profiles.items()}
        self._stats = {name: pstats.Stats(profile) for name, profile in profiles.items() if profile.getstats()}
        self._profiles = {}

    def _change(self, change: Callable[[str], None], phase: str) -> None:
        if self._times.is_measuring:
            self._disable()
            try:
                change(phase)
            finally:
                self._enable()

    def _disable(self) -> None:
        if self._times.top is not None:
            self._profiles[self._times.top].disable()

    def _enable(self) -> None:
        top = self._times.top
        assert top is not None
        if top not in self._profiles:
            self._profiles[top] = cProfile.Profile()
        self._profiles[top].enable()

    def summary(self) -> str:
        """Return the functions of each phase, the longest phase first."""
        ordered = sorted(self._stats.items(), key=lambda item: -item[1].total_tt)  # type: ignore[attr-defined]
        return "\n\n".join(f"Profile of {name}\n{self._functions(stats)}" for name, stats in ordered)

    def _functions(self, stats: pstats.Stats) -> str:
        stats.stream = stream = io.StringIO()  # type: ignore[attr-defined]
        stats.sort_stats("cumulative").print_stats(self.line_count_restriction)
        return stream.getvalue().strip()

    def write(self, folder: str, name: str) -> list[str]:
        """Write the summary and, with ``dump_stats``, each phase's statistics."""
        written = super().write(folder, name)
        if self.dump_stats:
            for phase, stats in self._stats.items():
                written.append(publish_export(folder, f"{name}-{_file_name_part(phase)}.prof", stats.dump_stats))
        return written

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_profiles": {}, "_stats": {}}


def _file_name_part(phase: str) -> str:
    """Return a phase's name in a form that is safe in a file name."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in phase)
