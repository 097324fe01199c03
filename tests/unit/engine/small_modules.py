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


class Logs(Tiny):
    """Logs ``loss`` in training and ``val_loss`` in validation; with ``mute``, not in the sanity check."""

    mute = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not (self.mute and self.trainer.sanity_checking):
            self.log("val_loss", 1.0)


def logs(**methods: Any) -> Logs:
    """A `Logs` with these methods and attributes."""
    return type("Net", (Logs,), methods)()


def calling(hook: str, function: Callable[..., object]) -> Callback:
    """A callback whose ``hook`` calls ``function(trainer)``."""
    kind = type("Calling", (Callback,), {hook: lambda self, trainer, *args, **options: function(trainer) and None})
    return kind()


def metrics(trainer: Fit) -> dict[str, float]:
    """Return the values that callbacks read."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
