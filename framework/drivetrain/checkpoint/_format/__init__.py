"""The on-disk format of checkpoints, its reader and its writer. This package does not depend on modules or runs."""

from drivetrain.checkpoint._format.checkpoint_reader import Checkpoint, Weights, load
from drivetrain.checkpoint._format.checkpoint_writer import commit, save
from drivetrain.checkpoint._format.collective_errors import run_collectively
from drivetrain.checkpoint._format.flattened_tensor import is_flattenable
from drivetrain.checkpoint._format.folder import StorageError
from drivetrain.checkpoint._format.manifest import AveragesRecord, CheckpointMetadata, Manifest, check_metadata
from drivetrain.checkpoint._format.staging import Contents, StagedCheckpoint, stage
from drivetrain.checkpoint._format.verification import verify
from drivetrain.checkpoint._format.write_plan import Sizes

__all__ = [
    "AveragesRecord",
    "Checkpoint",
    "CheckpointMetadata",
    "Contents",
    "Manifest",
    "Sizes",
    "StagedCheckpoint",
    "StorageError",
    "Weights",
    "check_metadata",
    "commit",
    "is_flattenable",
    "load",
    "run_collectively",
    "save",
    "stage",
    "verify",
]
