"""The checkpoint on disk: what its files hold, how they are written and read. Knows nothing of modules or runs."""

from drivetrain.checkpoint_format.agreement import agreed
from drivetrain.checkpoint_format.dealing import Sizes
from drivetrain.checkpoint_format.manifest import Facts, Manifest
from drivetrain.checkpoint_format.reader import Checkpoint, Weights, load
from drivetrain.checkpoint_format.staging import Contents, Staged, stage
from drivetrain.checkpoint_format.verifying import verify
from drivetrain.checkpoint_format.writing import commit, save

__all__ = [
    "Checkpoint",
    "Contents",
    "Facts",
    "Manifest",
    "Sizes",
    "Staged",
    "Weights",
    "agreed",
    "commit",
    "load",
    "save",
    "stage",
    "verify",
]
