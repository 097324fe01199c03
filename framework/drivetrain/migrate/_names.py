"""The modules that a program imports public names from, and Lightning's names of the classes that were renamed."""

from __future__ import annotations

from functools import cache
from importlib import import_module

RENAMED_CLASSES = {
    "LightningModule": "TrainModule",
    "LightningDataModule": "DataModule",
    "Trainer": "Fit",
    "ModelCheckpoint": "Checkpoint",
    "TQDMProgressBar": "ProgressBar",
    "RichModelSummary": "ModelSummary",
}
PUBLIC_MODULES = (
    "drivetrain",
    "drivetrain.callbacks",
    "drivetrain.loggers",
    "drivetrain.profilers",
    "drivetrain.tuner",
    "drivetrain.data",
    "drivetrain.environments",
)
_STRATEGIES = ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy")


@cache
def module_by_name() -> dict[str, str]:
    """Return a dictionary from each public name to the module to import the name from, without importing torch."""
    modules = dict.fromkeys(_STRATEGIES, "drivetrain_strategies")
    for module in PUBLIC_MODULES:
        for name in import_module(module).__all__:
            modules.setdefault(name, module)
    return modules
