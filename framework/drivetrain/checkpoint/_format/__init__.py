"""The checkpoint on disk: what its files hold, how they are written and read. Knows nothing of modules or runs."""

from drivetrain.checkpoint._format.checkpoint_reader import Checkpoint, Weights, load
from drivetrain.checkpoint._format.checkpoint_writer import commit, save
from drivetrain.checkpoint._format.collective_errors import agreed
from drivetrain.checkpoint._format.folder import StorageError
from drivetrain.checkpoint._format.manifest import Facts, Manifest, check_facts
from drivetrain.checkpoint._format.staging import Contents, Staged, stage
from drivetrain.checkpoint._format.verification import verify
from drivetrain.checkpoint._format.write_plan import Sizes

__all__ = [
    "Checkpoint",
    "Contents",
    "Facts",
    "Manifest",
    "Sizes",
    "Staged",
    "StorageError",
    "Weights",
    "agreed",
    "check_facts",
    "commit",
    "load",
    "save",
    "stage",
    "verify",
]
