"""Tuner: finds a learning rate and a batch size for what a `Fit` is going to run."""

from __future__ import annotations

from typing import Any

from drivetrain._engine.stage_loaders import DataArguments
from drivetrain._engine.trials import EngineTrials
from drivetrain.callbacks._batch_size_search import find_batch_size
from drivetrain.callbacks._lr_search import LRFind, find_lr
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.fit import Fit
from drivetrain.module._run_handle import is_attached
from drivetrain.module.train_module import TrainModule

_STAGES = ("fit", "validate", "test", "predict")


class Tuner:
    """Finds a learning rate and a batch size, by trials that leave everything as it was.

    A trial is a run of a copy of the module, with the strategy, the precision and the devices of the `Fit`, and without
    its callbacks, loggers and checkpoints. Every rank finds the same. What a search changes is the attribute that holds
    its finding, where it is asked to. Call it as `Fit.fit` is called: on every rank that there is.

    Args:
        fit: whose settings hold.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def lr_find(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        *,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFind:
        """Train with a growing learning rate, and look where the loss falls most steeply.

        Schedules are left out. The losses are over all ranks' samples of a step.

        Args:
            module: what is to be trained.
            train_dataloaders: the training loader, as for `Fit.fit`.
            val_dataloaders: not read: nothing is validated.
            datamodule: where the loader comes from instead.
            min_lr: of the first step.
            max_lr: of the last step.
            num_training: optimizer steps.
            mode: "exponential" or "linear": how the rate grows.
            early_stop_threshold: ends the search where the smoothed loss is more than so many times the best one; None
                never does.
            update_attr: set ``lr`` or ``learning_rate`` of the module or of its hyper-parameters.
            attr_name: which attribute instead.

        Returns:
            What was found: ``suggestion()``, ``results`` and ``plot()``.

        Raises:
            ConfigurationError: there is no attribute to update, or not one optimizer that the engine steps.
            Exception: whatever failed in the search; everything is as it was before.
        """
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        trials = self._trials("lr_find", "fit", module, DataArguments(train_dataloaders, val_dataloaders, datamodule))
        return find_lr(trials, min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)

    def scale_batch_size(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        *,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
    ) -> int:
        """Find the largest batch size, per rank, with which every rank has memory enough.

        Afterwards ``batch_arg_name``, where the module, the data module or their hyper-parameters have it, holds what
        was found. A loader that is given stays as it is.

        Args:
            module: what is to be run.
            train_dataloaders: a `DataLoader` to train on.
            val_dataloaders: not read with ``method="fit"``: nothing is validated.
            dataloaders: a `DataLoader` for the other methods.
            datamodule: where the loader comes from instead; it builds it with the attribute.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until one does not fit; "binsearch" goes on between the last two.
            steps_per_trial: optimizer steps (of evaluation: micro-batches) of each size.
            init_val: what is tried first.
            max_trials: sizes that are tried at most.
            batch_arg_name: the attribute of the module, of the data module or of their hyper-parameters.

        Returns:
            The largest size that was tried and fits; what the data hold for a rank, where that is less.

        Raises:
            ConfigurationError: the batch size cannot be changed, or not even 1 fits.
            Exception: whatever failed in a trial but for want of memory; everything is as it was before.
        """
        if method not in _STAGES:
            raise ConfigurationError(
                f"method={method!r}.{nearest(str(method), _STAGES)}",
                "it says which of Fit's methods the batches are for.",
                f"use one of {', '.join(map(repr, _STAGES))}.",
            )
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        evaluated = val_dataloaders if method == "fit" else dataloaders
        given = DataArguments(train_dataloaders if method == "fit" else None, evaluated, datamodule)
        trials = self._trials("scale_batch_size", method, module, given)
        return find_batch_size(trials, mode, init_val, max_trials, steps_per_trial, batch_arg_name)

    def _trials(self, verb: str, stage: str, module: Any, given: DataArguments) -> EngineTrials:
        if not isinstance(module, TrainModule) or is_attached(module):
            running = isinstance(module, TrainModule)
            raise ConfigurationError(
                f"{verb} was called within a run of {type(module).__name__}."
                if running
                else f"{verb} was given a {type(module).__name__}.",
                "it makes runs of its own." if running else "it runs a drivetrain.TrainModule.",
                "call it before fit; LearningRateFinder and BatchSizeFinder search as a run begins.",
            )
        if self._fit.fast_dev_run:
            raise ConfigurationError(
                f"{verb} with fast_dev_run={self._fit.fast_dev_run!r}.",
                "a dry run has too few steps to find anything by.",
                "leave fast_dev_run out.",
            )
        return EngineTrials(self._fit, stage, module, given)
