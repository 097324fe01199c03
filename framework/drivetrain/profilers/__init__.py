"""Profilers, which measure where a run spends its time. Every name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain.profilers.advanced_profiler import AdvancedProfiler as AdvancedProfiler
    from drivetrain.profilers.profiler import PassThroughProfiler as PassThroughProfiler
    from drivetrain.profilers.profiler import ProfiledRun as ProfiledRun
    from drivetrain.profilers.profiler import Profiler as Profiler
    from drivetrain.profilers.pytorch_profiler import PyTorchProfiler as PyTorchProfiler
    from drivetrain.profilers.simple_profiler import PhaseRow as PhaseRow
    from drivetrain.profilers.simple_profiler import SimpleProfiler as SimpleProfiler

_HOME = {
    "AdvancedProfiler": ".advanced_profiler",
    "PassThroughProfiler": ".profiler",
    "PhaseRow": ".simple_profiler",
    "ProfiledRun": ".profiler",
    "Profiler": ".profiler",
    "PyTorchProfiler": ".pytorch_profiler",
    "SimpleProfiler": ".simple_profiler",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
