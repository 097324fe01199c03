"""The on-disk format of checkpoints, its reader and its writer. This package does not depend on modules or runs."""

from drivetrain._format.checkpoint_reader import CheckpointReader, Weights, load
from drivetrain._format.checkpoint_writer import save, write_checkpoint
from drivetrain._format.collective_errors import run_collectively
from drivetrain._format.flattened_tensor import is_flattenable
from drivetrain._format.manifest import AveragesRecord, CheckpointMetadata, Manifest, check_metadata
from drivetrain._format.prepared_checkpoint import PreparedCheckpoint, StateToSave, prepare_checkpoint
from drivetrain._format.verification import verify

__all__ = [
    "AveragesRecord",
    "CheckpointMetadata",
    "CheckpointReader",
    "Manifest",
    "PreparedCheckpoint",
    "StateToSave",
    "Weights",
    "check_metadata",
    "is_flattenable",
    "load",
    "prepare_checkpoint",
    "run_collectively",
    "save",
    "verify",
    "write_checkpoint",
]
