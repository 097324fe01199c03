"""Data loading: sample order, sharding over ranks, and transfer of batches to the device.

Every name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain._data.combined import CombinedLoader as CombinedLoader
    from drivetrain._data.sample_order import order as order
    from drivetrain._data.splitting import split_by_rank as split_by_rank
    from drivetrain.data.datamodule import DataModule as DataModule
    from drivetrain.data.predictions import Predictions as Predictions
    from drivetrain.data.predictions import read_predictions as read_predictions

_HOME = {
    "CombinedLoader": "drivetrain._data.combined",
    "DataModule": ".datamodule",
    "Predictions": ".predictions",
    "order": "drivetrain._data.sample_order",
    "read_predictions": ".predictions",
    "split_by_rank": "drivetrain._data.splitting",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
