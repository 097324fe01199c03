"""Checkpoints: one layout, written under any strategy and read under any other."""

from drivetrain.checkpoint.plain import PlainCheckpoint
from drivetrain.checkpoint_format import Checkpoint, load, verify

__all__ = ["Checkpoint", "PlainCheckpoint", "load", "verify"]
