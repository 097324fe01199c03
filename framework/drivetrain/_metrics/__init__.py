"""Logged values: kept as tensors while the loop runs, brought over and reduced at a flush."""

from drivetrain._metrics.metric_store import MetricStore

__all__ = ["MetricStore"]
