"""RunRequest: one call of an entry point, with the data that was passed to it, and where a stage finds its loaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain._loops.hooks import is_overridden
from drivetrain._run_state import Progress
from drivetrain._runs.run_folder import RunFolder
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.run_context import RunContext

_METHOD_PREFIXES = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One call of `Fit.fit`, `validate`, `test` or `predict`.

    Attributes:
        trainer: the `Fit`, whose settings apply.
        stage: "fit", "validate", "test" or "predict".
        module: the module to run.
        train: the training loader(s) that were passed.
        evaluate: the validation, test or prediction loader(s) that were passed.
        datamodule: the data module that was passed.
        ckpt_path: the checkpoint to start from: a path or URL, "last", "best" or "auto"; None for a fresh start.
        return_predictions: whether to return the outputs of ``predict_step``.
        allow: the kinds of differences from the resumed run to accept: some of "data", "optimizer", "scheduler" and
            "module".
        trial: whether the run is a trial, whose weights are discarded. A trial has no schedulers and does not call
            `configure_callbacks`.
        averaged: whether to evaluate the averages in the checkpoint; None for the weights that its run evaluated with.
        counters: the counters of the preceding run, for an evaluation; None for new counters.
        previous_folder: the folder of the preceding run; None if there was none.
    """

    trainer: RunContext
    stage: str
    module: TrainModule
    train: Any = None
    evaluate: Any = None
    datamodule: DataModule | None = None
    ckpt_path: str | None = None
    return_predictions: bool = True
    allow: tuple[str, ...] = ()
    trial: bool = False
    averaged: bool | None = None
    counters: Progress | None = None
    previous_folder: RunFolder | None = None

    def find_loaders(self, kind: str) -> Any:
        """Return the loader(s) for ``kind`` ("train", "validate", "test", "predict"), or None if there are none.

        Loaders that were passed take precedence over the loaders of the data module, and these over the module's.

        Raises:
            ConfigurationError: loaders and a data module were both passed.
        """
        name, given = loader_method(kind), self.train if kind == "train" else self.evaluate
        if given is not None and self.datamodule is not None:
            raise ConfigurationError(
                f"Both {kind} loaders and a datamodule were given.",
                "the loaders or the datamodule would be ignored.",
                "pass either the loaders or datamodule=.",
            )
        if given is not None:
            return given
        if self.datamodule is not None and is_overridden(name, self.datamodule, DataModule):
            return getattr(self.datamodule, name)()
        return getattr(self.module, name)() if is_overridden(name, self.module, TrainModule) else None


def loader_method(kind: str) -> str:
    """Return the name of the method that provides the loader(s) for ``kind``."""
    return f"{_METHOD_PREFIXES[kind]}_dataloader"
