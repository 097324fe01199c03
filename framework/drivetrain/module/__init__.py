"""TrainModule: the base class of users' models."""

from drivetrain.module.train_module import TrainModule

__all__ = ["TrainModule"]
