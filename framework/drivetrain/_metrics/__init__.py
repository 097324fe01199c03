"""Logged values: stored as tensors during the loop, copied to the host and reduced over ranks at a flush."""

from drivetrain._metrics.metric_store import MetricStore

__all__ = ["MetricStore"]
