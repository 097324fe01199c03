"""Data: the order of samples, how they are dealt to ranks, and how batches reach the device."""

from __future__ import annotations

from drivetrain.data.ahead import ReadAhead
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.datamodule import DataModule
from drivetrain.data.loaders import prepare_loader
from drivetrain.data.order import KeyedPermutation, SequentialOrder, order
from drivetrain.data.prefetch import Prefetcher
from drivetrain.data.sharding import START, Origin, Share
from drivetrain.data.source import BatchSource
from drivetrain.transfer import first_dimension, move_to

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
]
