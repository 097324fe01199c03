"""Checkpoints: one layout, written under any strategy and read under any other."""

from drivetrain.checkpoint.consolidating import consolidate
from drivetrain.checkpoint.converting import convert
from drivetrain.checkpoint.showing import diff, show
from drivetrain.checkpoint_format import Checkpoint, load, verify

__all__ = ["Checkpoint", "consolidate", "convert", "diff", "load", "show", "verify"]
