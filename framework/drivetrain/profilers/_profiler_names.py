"""Profilers by name: those that come with drivetrain, and those that other packages register."""

from __future__ import annotations

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.errors import ConfigurationError
from drivetrain.profilers.profiler import Profiler


def _simple() -> Profiler:
    from drivetrain.profilers.simple_profiler import SimpleProfiler

    return SimpleProfiler()


def _advanced() -> Profiler:
    from drivetrain.profilers.advanced_profiler import AdvancedProfiler

    return AdvancedProfiler()


def _pytorch() -> Profiler:
    from drivetrain.profilers.pytorch_profiler import PyTorchProfiler

    return PyTorchProfiler()


_NAMES = EntryPointRegistry[Profiler](
    "profiler",
    "drivetrain.profilers",
    Profiler,  # type: ignore[type-abstract]
    {"simple": _simple, "advanced": _advanced, "pytorch": _pytorch},
    words=(),
    why="it names what measures a run",
    instead="a drivetrain.profilers.Profiler, or None",
)


def profiler_of(given: object) -> Profiler:
    """Return what ``Fit(profiler=...)`` means.

    Args:
        given: a profiler, or the name of one.

    Raises:
        ConfigurationError: nobody has the name, what is registered makes no profiler, or it is neither.
    """
    if isinstance(given, str):
        _NAMES.check(given)
        return _NAMES.make(given)
    if isinstance(given, Profiler):
        return given
    raise ConfigurationError(
        f"profiler={given!r} is no Profiler.",
        "the engine starts and stops its phases through that interface.",
        "pass 'simple', 'advanced', 'pytorch', a drivetrain.profilers.Profiler, or None.",
    )
