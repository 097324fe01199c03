"""Data loading: sample order, sharding over ranks, and transfer of batches to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.datamodule import DataModule
from drivetrain.data.order import KeyedPermutation, SequentialOrder, order

if TYPE_CHECKING:
    from drivetrain.data.predictions import Predictions as Predictions
    from drivetrain.data.predictions import read_predictions as read_predictions
    from drivetrain.data.splitting import split_by_rank as split_by_rank

__all__ = [
    "CombinedLoader",
    "DataModule",
    "KeyedPermutation",
    "Predictions",
    "SequentialOrder",
    "order",
    "read_predictions",
    "split_by_rank",
]

_HOME = {"Predictions": ".predictions", "read_predictions": ".predictions", "split_by_rank": ".splitting"}

__getattr__, _ = lazy_names(__name__, _HOME)
