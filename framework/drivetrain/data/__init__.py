"""Data: the order of samples, how they are dealt to ranks, and how batches reach the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.data.ahead import ReadAhead
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.datamodule import DataModule
from drivetrain.data.loaders import prepare_loader
from drivetrain.data.order import KeyedPermutation, SequentialOrder, order
from drivetrain.data.prefetch import Prefetcher
from drivetrain.data.sharding import START, Origin, Share
from drivetrain.data.source import BatchSource
from drivetrain.lazy_names import lazy_names
from drivetrain.transfer import first_dimension, move_to

if TYPE_CHECKING:
    from drivetrain.data.splitting import split_by_rank as split_by_rank

__getattr__, _ = lazy_names(__name__, {"split_by_rank": ".splitting"})

__all__ = [
    "START",
    "BatchSource",
    "CombinedLoader",
    "DataModule",
    "KeyedPermutation",
    "Origin",
    "Prefetcher",
    "ReadAhead",
    "SequentialOrder",
    "Share",
    "first_dimension",
    "move_to",
    "order",
    "prepare_loader",
    "split_by_rank",
]
