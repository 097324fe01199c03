"""Checkpoints: for now one directory of safetensors and JSON, written by rank 0."""

from drivetrain.checkpoint.plain import PlainCheckpoint

__all__ = ["PlainCheckpoint"]
