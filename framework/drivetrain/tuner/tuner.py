"""Tuner: finds a learning rate and a batch size by trial runs, before a fit."""

from __future__ import annotations

from typing import Any

from drivetrain._config.argument_checks import check_choice
from drivetrain._engine.run_request import RunRequest
from drivetrain._engine.trials import EngineTrials
from drivetrain.callbacks import BatchSizeFinder, LearningRateFinder
from drivetrain.callbacks.learning_rate_finder import LRFind
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError
from drivetrain.fit import Fit, check_module
from drivetrain.module.train_module import TrainModule

_STAGES = ("fit", "validate", "test", "predict")


class Tuner:
    """Finds a learning rate or a batch size by trial runs, and sets the attribute that holds this value.

    A trial runs a copy of the module with the strategy, precision and devices of the `Fit`, but without the callbacks,
    loggers and checkpoints of the `Fit`. Trials leave no other changes. All ranks get the same result. Like `Fit.fit`,
    the methods must be called on every rank.

    Args:
        fit: the `Fit` whose settings the trials use.
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
        """Train with an increasing learning rate, and find the rate at which the loss falls most steeply.

        Learning-rate schedules are ignored. The loss of a step is the mean over the samples of all ranks.

        Args:
            module: the module to train.
            train_dataloaders: the training loader, as for `Fit.fit`.
            val_dataloaders: not used, because trials do not validate.
            datamodule: a data module that provides the training loader instead.
            min_lr: the learning rate of the first step.
            max_lr: the learning rate of the last step.
            num_training: the number of optimizer steps of the search.
            mode: how the rate grows: "exponential" or "linear".
            early_stop_threshold: the multiple of the best smoothed loss above which the search stops; None never stops
                early.
            update_attr: whether to set the attribute ``lr`` or ``learning_rate`` of the module or its hyper-parameters.
            attr_name: the name of another attribute to set instead.

        Returns:
            The rates and losses, with ``suggestion()`` and ``plot()``.

        Raises:
            ConfigurationError: there is no attribute to update, or the module does not have exactly one optimizer that
                the engine steps.
            Exception: an exception of a trial. The state before the search has been restored.
        """
        finder = LearningRateFinder(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        request = RunRequest(self._fit, "fit", module, train_dataloaders, val_dataloaders, datamodule)
        return finder.search(self._trials("lr_find", request))

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
        """Find the largest batch size per rank that fits into the memory of every rank.

        The method sets the attribute ``batch_arg_name`` wherever it exists among the module, the data module and their
        hyper-parameters. A loader that is passed as an argument is not changed.

        Args:
            module: the module to run.
            train_dataloaders: a `DataLoader` to train on.
            val_dataloaders: not used, because trials do not validate.
            dataloaders: a `DataLoader` for the methods other than "fit".
            datamodule: a data module that provides the loader instead, and reads the batch size from the attribute.
            method: "fit", "validate", "test" or "predict".
            mode: "power" doubles the size until a size does not fit. "binsearch" then also searches
                between the last two sizes.
            steps_per_trial: the number of optimizer steps per trial, or of micro-batches for methods other than "fit".
            init_val: the first size to try.
            max_trials: the maximum number of sizes to try.
            batch_arg_name: the name of the attribute to set in the module, the data module or their hyper-parameters.

        Returns:
            The largest size that was tried and fits, or the number of samples per rank, if that number is smaller.

        Raises:
            ConfigurationError: the batch size cannot be changed, or not even size 1 fits.
            Exception: an exception of a trial other than out of memory. The state before the search has been restored.
        """
        check_choice("scale_batch_size", "method", method, _STAGES, "the method of Fit that uses the batch size")
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name)
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        eval_dataloaders = val_dataloaders if method == "fit" else dataloaders
        train = train_dataloaders if method == "fit" else None
        request = RunRequest(self._fit, method, module, train, eval_dataloaders, datamodule)
        return finder.search(self._trials("scale_batch_size", request))

    def _trials(self, method: str, request: RunRequest) -> EngineTrials:
        check_module(method, request.module)
        if self._fit.fast_dev_run:
            raise ConfigurationError(
                f"{method} with fast_dev_run={self._fit.fast_dev_run!r}.",
                "a dry run has too few steps for a search.",
                "remove fast_dev_run.",
            )
        return EngineTrials(request)
