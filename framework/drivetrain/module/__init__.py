"""What users subclass: `TrainModule`."""

from drivetrain.module.train_module import TrainModule

__all__ = ["TrainModule"]
