"""The on-disk format of checkpoints, its reader and its writer. This package does not depend on modules or runs."""

from drivetrain._format.checkpoint_reader import CheckpointReader, Weights, load
from drivetrain._format.checkpoint_writer import commit, save
from drivetrain._format.collective_errors import run_collectively
from drivetrain._format.flattened_tensor import is_flattenable
from drivetrain._format.host_copy import CheckpointCopy, StateToSave, copy_to_host
from drivetrain._format.manifest import AveragesRecord, CheckpointMetadata, Manifest, check_metadata
from drivetrain._format.verification import verify

__all__ = [
    "AveragesRecord",
    "CheckpointCopy",
    "CheckpointMetadata",
    "CheckpointReader",
    "Manifest",
    "StateToSave",
    "Weights",
    "check_metadata",
    "commit",
    "copy_to_host",
    "is_flattenable",
    "load",
    "run_collectively",
    "save",
    "verify",
]
