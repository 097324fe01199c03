"""Tuner: searches for a learning rate and a batch size. Each name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain.callbacks.learning_rate_finder import LRFind as LRFind
    from drivetrain.tuner.tuner import Tuner as Tuner

_HOME = {"LRFind": "drivetrain.callbacks.learning_rate_finder", "Tuner": ".tuner"}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
