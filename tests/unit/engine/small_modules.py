"""Modules and callbacks of which a test defines a method or two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_case import Regression, Tiny

from drivetrain import Callback, Fit


def tiny(**methods: Any) -> Tiny:
    """A `Tiny` with these methods and attributes."""
    return type("Net", (Tiny,), methods)()


def linear(**methods: Any) -> Regression:
    """A `Regression` with these methods and attributes."""
    return type("Net", (Regression,), methods)()


def calling(hook: str, function: Callable[..., object]) -> Callback:
    """A callback whose ``hook`` calls ``function(trainer)``."""
    kind = type("Calling", (Callback,), {hook: lambda self, trainer, *args, **options: function(trainer) and None})
    return kind()


def metrics(trainer: Fit) -> dict[str, float]:
    """Return the values that callbacks read."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
