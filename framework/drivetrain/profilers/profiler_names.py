"""Look up profilers by name: those of drivetrain, and those that other packages register."""

from __future__ import annotations

from drivetrain import profilers
from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.errors import ConfigurationError
from drivetrain.profilers.profiler import Profiler

_NAMES = EntryPointRegistry[Profiler](
    "profiler",
    "drivetrain.profilers",
    Profiler,  # type: ignore[type-abstract]
    {
        "simple": lambda: profilers.SimpleProfiler(),  # a lambda, because the class is imported on first use
        "advanced": lambda: profilers.AdvancedProfiler(),
        "pytorch": lambda: profilers.PyTorchProfiler(),
    },
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
        return _NAMES.make(profiler)
    if isinstance(profiler, Profiler):
        return profiler
    raise ConfigurationError(
        f"profiler={profiler!r} is not a Profiler.",
        "the engine starts and stops phases through the methods of Profiler.",
        "pass 'simple', 'advanced', 'pytorch', a drivetrain.profilers.Profiler, or None.",
    )
