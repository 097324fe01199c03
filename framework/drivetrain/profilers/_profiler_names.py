"""Look up profilers by name: those of drivetrain, and those that other packages register."""

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
    other_values=(),
    meaning="the name selects a profiler",
    alternatives="a drivetrain.profilers.Profiler, or None",
)


def resolve_profiler(profiler: object) -> Profiler:
    """Return the profiler for the value of ``Fit(profiler=...)``.

    Args:
        profiler: a profiler or its name.

    Raises:
        ConfigurationError: no profiler has the name, the registered object does not make a profiler, or the value is
            neither a name nor a profiler.
    """
    if isinstance(profiler, str):
        _NAMES.check(profiler)
        return _NAMES.make(profiler)
    if isinstance(profiler, Profiler):
        return profiler
    raise ConfigurationError(
        f"profiler={profiler!r} is not a Profiler.",
        "the engine starts and stops phases through the methods of Profiler.",
        "pass 'simple', 'advanced', 'pytorch', a drivetrain.profilers.Profiler, or None.",
    )
