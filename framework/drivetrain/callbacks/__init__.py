"""Callbacks that ship with drivetrain. Each name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain.callbacks.accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from drivetrain.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from drivetrain.callbacks.checkpoint import Checkpoint as Checkpoint
    from drivetrain.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from drivetrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from drivetrain.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from drivetrain.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from drivetrain.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from drivetrain.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from drivetrain.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
    from drivetrain.callbacks.loss_spike_guard import LossSpikeGuard as LossSpikeGuard
    from drivetrain.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from drivetrain.callbacks.model_summary import ModelSummary as ModelSummary
    from drivetrain.callbacks.non_finite_guard import NonFiniteGuard as NonFiniteGuard
    from drivetrain.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from drivetrain.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from drivetrain.callbacks.progress_bar import ProgressBar as ProgressBar
    from drivetrain.callbacks.replica_check import ReplicaCheck as ReplicaCheck
    from drivetrain.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar
    from drivetrain.callbacks.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from drivetrain.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from drivetrain.callbacks.timer import Timer as Timer
    from drivetrain.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from drivetrain.callbacks.weight_averaging import WeightAveraging as WeightAveraging

_HOME = {
    "BackboneFinetuning": ".finetuning",
    "BaseFinetuning": ".finetuning",
    "BasePredictionWriter": ".prediction_writer",
    "BatchSizeFinder": ".batch_size_finder",
    "Checkpoint": ".checkpoint",
    "DeviceStatsMonitor": ".device_stats_monitor",
    "EMAWeightAveraging": ".weight_averaging",
    "EarlyStopping": ".early_stopping",
    "GarbageCollection": ".garbage_collection",
    "GradientAccumulationScheduler": ".accumulation_scheduler",
    "LambdaCallback": ".lambda_callback",
    "LearningRateFinder": ".learning_rate_finder",
    "LearningRateMonitor": ".lr_monitor",
    "LossSpikeGuard": ".loss_spike_guard",
    "ModelSummary": ".model_summary",
    "NonFiniteGuard": ".non_finite_guard",
    "PredictionWriter": ".prediction_writer",
    "ProgressBar": ".progress_bar",
    "ReplicaCheck": ".replica_check",
    "RichProgressBar": ".rich_progress_bar",
    "StochasticWeightAveraging": ".stochastic_weight_averaging",
    "ThroughputMonitor": ".throughput_monitor",
    "Timer": ".timer",
    "WeightAveraging": ".weight_averaging",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
