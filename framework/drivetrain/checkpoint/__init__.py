"""Checkpoints: one layout, written under any strategy and read under any other."""

from drivetrain.checkpoint_format import Checkpoint, load, verify

__all__ = ["Checkpoint", "load", "verify"]
