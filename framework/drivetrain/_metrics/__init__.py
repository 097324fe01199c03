"""Logged values: kept as tensors while the loop runs, brought over and reduced at a flush."""

from drivetrain._metrics.store import MetricStore

__all__ = ["MetricStore"]
