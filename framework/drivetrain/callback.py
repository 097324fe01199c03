"""Callback: the base class of objects that extend a run without changes to the module or the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


class Callback:
    """Base class of objects that extend a run.

    Every method is optional, because each has a default that does nothing. A hook that no callback overrides is not
    called at all and costs nothing. The methods fall into two groups:

    - *Hooks* (`setup`, `teardown` and everything named ``on_*``) run at fixed points of the run. Most callbacks
      override only these.
    - *State*: `state_dict` and `load_state_dict` are for small values, `save_tensors` and `load_tensors` for sharded
      tensors.

    Callbacks that write checkpoints, stop training, print progress or change the accumulation window have what the
    protocols below this class describe (`SavesBeforeLeaving`, `MonitorsValues`, ...). The engine asks only the
    callbacks that have it.

    Hooks run in the order of ``docs/how-a-step-runs.md``: callbacks first, by descending `priority`, then the module.
    Callbacks with a negative priority run after the module's hook. Use a negative priority for callbacks that read
    logged values, such as early stopping and checkpoints.

    Every rank calls every callback in the same order, so collectives in hooks match.

    In hooks, ``trainer`` is the running `Fit`, typed as `RunContext`, and ``module`` is the `TrainModule` that it runs.
    A callback that works with only one class of modules may annotate ``module`` with this class.
    """

    _logging_module: weakref.ref[Any] | None = None

    priority: int = 0
    """Callbacks with a higher value run earlier. Callbacks with a negative value run after the module's hook."""

    shown_as: str | None = None
    """The attribute of `RunContext` that shows callbacks of this kind, such as "checkpoint_callback"; None for none."""

    # State of the callback in checkpoints

    _key_arguments: tuple[str, ...] = ()  # attributes that distinguish two callbacks of the same class
    _saved_attributes: tuple[str, ...] = ()  # attributes of a built-in callback that are its state

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint. Two callbacks of one class need different keys."""
        arguments = {name: getattr(self, name) for name in self._key_arguments}
        return f"{type(self).__qualname__}{arguments or ''}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: JSON-serializable values and tensors."""
        return {name.lstrip("_"): deepcopy(getattr(self, name)) for name in self._saved_attributes}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        After a run whose ranks were processes that have since exited, this method is also called in the process that
        launched them, with the state of rank 0.
        """
        for name in self._saved_attributes:
            setattr(self, name, state_dict[name.lstrip("_")])

    def save_tensors(self, trainer: RunContext, module: Any) -> Mapping[str, Any]:
        """Return tensors by name. Checkpoints store them like weights: each rank writes the shards that it holds.

        The tensors can be loaded at any world size and under any strategy. Names, shapes and dtypes must be the same on
        every rank. Prefer `state_dict` for tensors that are small or the same on every rank.

        Returns:
            Whole tensors (those of rank 0 are saved), DTensors, or `drivetrain.strategies.ParameterShard` objects for
            this rank's shards, as returned by ``trainer.strategy.shard_of`` for a value of
            ``trainer.strategy.model_state()``.
        """
        return {}

    def load_tensors(self, trainer: RunContext, module: Any, tensors: Mapping[str, Any]) -> None:
        """Restore the tensors that `save_tensors` returned. The engine calls this method after `load_state_dict`.

        Args:
            trainer: the run.
            module: the module, with its weights already loaded.
            tensors: whole tensors by name. A tensor with the name of a weight that this rank holds a shard of is a
                `drivetrain.strategies.ParameterShard` of the same region.
        """

    # Logging

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value, as `TrainModule.log` does.

        Raises:
            ConfigurationError: no run is in progress.
        """
        self._module_for_logging().log(name, value, **options)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values, as `TrainModule.log_dict` does.

        Raises:
            ConfigurationError: no run is in progress.
        """
        self._module_for_logging().log_dict(dictionary, **options)

    def _module_for_logging(self) -> Any:
        module = None if self._logging_module is None else self._logging_module()
        if module is None:
            raise ConfigurationError(
                f"{type(self).__name__}.log was called outside a run.",
                "logged values belong to an epoch of training, validation or testing.",
                "call it from a hook, or pass numbers to the loggers with trainer.log_metrics.",
            )
        return module

    # Hooks: set-up, failure and checkpoints

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Called before all other hooks, on every rank; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Called after all other hooks, even after a failure."""

    def on_exception(self, trainer: RunContext, module: Any, exception: BaseException) -> None:
        """Called when the run raised ``exception``, which is re-raised afterwards."""

    def on_save_checkpoint(self, trainer: RunContext, module: Any, checkpoint: dict[str, Any]) -> None:
        """Add JSON-serializable values or tensors to ``checkpoint``, a dict that is separate for each callback."""

    def on_load_checkpoint(self, trainer: RunContext, module: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the values that `on_save_checkpoint` added to ``checkpoint``."""

    # Hooks: training

    def on_fit_start(self, trainer: RunContext, module: Any) -> None:
        """Called once the module and optimizers are set up, before the sanity validation."""

    def on_fit_end(self, trainer: RunContext, module: Any) -> None:
        """Called after training, before `teardown`."""

    def on_sanity_check_start(self, trainer: RunContext, module: Any) -> None:
        """Called before the sanity validation."""

    def on_sanity_check_end(self, trainer: RunContext, module: Any) -> None:
        """Called after the sanity validation."""

    def on_train_start(self, trainer: RunContext, module: Any) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: RunContext, module: Any) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Called before an epoch's first micro-batch."""

    def on_train_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Called after an epoch's last micro-batch and validation, when the epoch's metrics have been reduced."""

    def on_train_batch_start(self, trainer: RunContext, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Called before a micro-batch. Returning -1 on every rank skips the rest of the epoch."""

    def on_train_batch_end(
        self, trainer: RunContext, module: Any, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Called after a micro-batch. ``outputs["loss"]`` is the loss, detached and without loss scaling."""

    def on_before_zero_grad(self, trainer: RunContext, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Called at the start of an accumulation window, before gradients are cleared."""

    def on_before_backward(self, trainer: RunContext, module: Any, loss: torch.Tensor) -> None:
        """Called before each backward pass, with the loss as `training_step` returned it."""

    def on_after_backward(self, trainer: RunContext, module: Any) -> None:
        """Called after every backward pass."""

    def on_before_optimizer_step(self, trainer: RunContext, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Called before gradients are clipped and the optimizer steps. Gradients carry no loss scale here."""

    # Hooks: validation, testing and prediction

    def on_validation_start(self, trainer: RunContext, module: Any) -> None:
        """Called before a validation run."""

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        """Called after a validation run, when its metrics have been reduced."""

    def on_validation_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Called before the first validation micro-batch."""

    def on_validation_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Called after the last validation micro-batch."""

    def on_validation_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation micro-batch."""

    def on_validation_batch_end(
        self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation micro-batch, with what `validation_step` returned."""

    def on_test_start(self, trainer: RunContext, module: Any) -> None:
        """Called before a test run."""

    def on_test_end(self, trainer: RunContext, module: Any) -> None:
        """Called after a test run, when its metrics have been reduced."""

    def on_test_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Called before the first test micro-batch."""

    def on_test_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Called after the last test micro-batch."""

    def on_test_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test micro-batch."""

    def on_test_batch_end(
        self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test micro-batch, with what `test_step` returned."""

    def on_predict_start(self, trainer: RunContext, module: Any) -> None:
        """Called before a prediction run."""

    def on_predict_end(self, trainer: RunContext, module: Any) -> None:
        """Called after a prediction run."""

    def on_predict_epoch_start(self, trainer: RunContext, module: Any) -> None:
        """Called before the first prediction micro-batch."""

    def on_predict_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Called after the last prediction micro-batch."""

    def on_predict_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction micro-batch."""

    def on_predict_batch_end(
        self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a prediction micro-batch, with what `predict_step` returned."""


def bind_logging(callback: Callback, module: Any) -> None:
    """Connect ``callback.log`` to ``module.log``, or disconnect it if ``module`` is None."""
    # The reference is weak, so that copying the callback does not copy the module.
    callback.__dict__["_logging_module"] = None if module is None else weakref.ref(module)


# What a callback may have besides: the engine asks only those that have it. Answers are the same on every rank.


class Trials(Protocol):
    """Runs a few steps of a call of `Fit.fit` or another entry point before it begins, and restores all state."""

    stage: str
    """"fit", "validate", "test" or "predict"."""

    module: Any
    """The module passed to the call. A trial runs a copy."""

    datamodule: Any
    """The data module passed to the call, or None. A trial runs a copy."""

    loaders: Any
    """The loaders passed to the call; None if the module or the data module provides them."""

    is_dry_run: bool
    """Whether ``fast_dev_run`` is on."""

    def run(self, callback: Any, steps: int, prepare: Callable[[Any, Any, Any], Any] | None = None) -> None:
        """Run a number of steps on copies, with ``callback`` as the only callback and without loggers. Collective.

        Args:
            callback: observes the trial and may change the optimizer's settings. If the trial ran in other processes,
                the ``state_dict`` of the callback there is loaded into the caller's object.
            steps: optimizer steps; in stages other than fit, micro-batches of each loader.
            prepare: a function of three arguments: the copy of the module, the copy of the data module (or None), and
                `loaders`. The function may change the copies, and returns the loaders to use.

        Raises:
            Exception: the trial failed on this rank or another; all state is restored.
        """

    def fits(self, callback: Any, steps: int, prepare: Callable[[Any, Any, Any], Any] | None = None) -> bool:
        """Run a trial as `run` does; return whether the trial fits into memory and the data has a batch for it.

        False means that a rank ran out of memory, or that the data has no batch of the requested size.
        """

    def declare_tuned(self, name: str) -> None:
        """Declare that a finder sets hyper-parameter ``name``.

        For ``ckpt_path`` "auto", "last" and "best", runs that differ only in this hyper-parameter are the same
        experiment.
        """

    def log_info(self, text: str, *values: Any) -> None:
        """Log a message on rank 0, with ``values`` as the arguments of the format string ``text``."""


@runtime_checkable
class SearchesBeforeLaunch(Protocol):
    """Finds a setting by trial runs, which the module or the data module reads during set-up."""

    def before_launch(self, trials: Trials) -> None:
        """Search for a setting before the run starts, before processes are launched and before `Callback.setup`.

        If ranks already exist (torchrun, SLURM), every rank calls the method. Callbacks that the module's
        ``configure_callbacks`` returns do not exist yet, so this method is not called for them.

        Args:
            trials: an object that runs a few steps of the requested stage and then restores all state.
        """


@runtime_checkable
class SavesBeforeLeaving(Protocol):
    """Saves a checkpoint to resume from when a preemption signal or ``max_time`` ends the run early."""

    def save_before_leaving(self, trainer: RunContext, module: Any) -> bool:
        """Save with `Fit.save_checkpoint` or `Fit.save`. A function passed to `save` is called before the run ends.

        Called on every rank, between two accumulation windows.

        Returns:
            True if this callback saved or requested a checkpoint that the run can resume from. If no callback returns
            True, the engine warns that nothing was saved.
        """


@runtime_checkable
class WritesFolders(Protocol):
    """Writes files into folders of its own."""

    writes_to: Sequence[str]
    """Folders and fsspec URLs that this callback writes to, which are read after `Callback.setup`.

    `Fit.fit` checks before the first step that the folders are writable. ``ckpt_path="last"``, ``"best"`` and
    ``"auto"`` search the folders for checkpoints.
    """


@runtime_checkable
class WantsRunFolder(Protocol):
    """Writes into the run's folder."""

    wants_run_folder: bool
    """Whether this callback needs ``trainer.log_dir`` even if the fit has no loggers."""


@runtime_checkable
class KeepsCheckpoints(Protocol):
    """Keeps checkpoints of the run."""

    kept_checkpoints: Sequence[str]
    """Paths of the checkpoints that were written and not removed; a rollback chooses one of them."""

    best_model_path: str
    """Path of the best checkpoint, which ``ckpt_path="best"`` loads; "" if there is none."""

    saves_resumable: bool
    """Whether a run can resume from the checkpoints. Weights alone do not suffice."""


@runtime_checkable
class SavesOnException(Protocol):
    """Saves a run that fails."""

    save_on_exception: bool
    """Whether this callback calls `RunContext.save` in ``on_exception``. The run then copies buffers,
    generators and metrics before each step, because a step that fails has changed them."""


@runtime_checkable
class FollowsRollbacks(Protocol):
    """Has state that is not the one of the checkpoint that a run rolls back to."""

    def before_rollback(self, trainer: RunContext, module: Any) -> None:
        """Called before the run rolls back to an earlier checkpoint, whose callback state is loaded next."""

    def after_rollback(self, trainer: RunContext, module: Any, path: str) -> None:
        """Called after the run rolled back to the checkpoint of step ``trainer.global_step`` at ``path``."""


@runtime_checkable
class MonitorsValues(Protocol):
    """Reads logged values."""

    monitors: Mapping[str, str]
    """Logged values that this callback requires, each with the argument that requires it, for error messages.

    For example ``{"val_loss": "EarlyStopping(monitor='val_loss')"}``. If nothing logs a required value, the engine
    warns in the first step.
    """


@runtime_checkable
class SchedulesWindows(Protocol):
    """Changes the size of accumulation windows."""

    def micro_batches_per_window(self, epoch: int) -> int:
        """Return the micro-batches per window in ``epoch``, from which the engine estimates the number of steps."""


@runtime_checkable
class EndsRuns(Protocol):
    """Ends runs, which then do not train further when they are resumed."""

    def reason_for_ending(self, state_dict: Mapping[str, Any]) -> str | None:
        """Return why this callback ended the run that saved ``state_dict``; None if this callback did not end it."""


@runtime_checkable
class HoldsAverages(Protocol):
    """Averages weights: `Callback.save_tensors` returns the averages under the names of their weights."""

    evaluates_averages: bool | None
    """Whether the run evaluates with the averages; None if there are no averages now.

    Checkpoints also hold averages if only weights are saved, and record the answer: tests, loaded modules and
    exports use the weights that the run evaluated with. If several callbacks have averages, the first that
    evaluates with them counts.
    """


@runtime_checkable
class ReplacesWeights(Protocol):
    """Replaces weights of the module for a while."""

    def trained_weights(self, trainer: RunContext, module: Any) -> Mapping[str, Any]:
        """Return, by name, the trained values of weights that this callback has replaced in the module for now.

        Checkpoints contain these values as the weights. Their form is that of `Callback.save_tensors`.
        """


@runtime_checkable
class StoresPredictions(Protocol):
    """Stores predictions where a later run finds them."""

    def existing_predictions(self, trainer: RunContext, module: Any) -> Callable[[int, int], bool] | None:
        """Return a function that determines whether an earlier run has stored the predictions of a batch.

        The engine calls this method once in `Fit.predict` with ``return_predictions=False``. A batch is skipped,
        including its hooks, if the functions of all callbacks return True for it.

        Returns:
            ``is_predicted(batch_idx, dataloader_idx)``. `RunContext.batch_indices` is None if the batch has not been
            read yet. None, on all ranks, if there are no earlier predictions.
        """


@runtime_checkable
class ReportsProgress(Protocol):
    """Prints lines of progress."""

    def write_progress(self, trainer: RunContext, module: Any, batches: int) -> None:
        """Print a line of progress, if one is due and the output is not a terminal.

        In training, the engine calls this method every ``log_every_n_steps`` optimizer steps, after the logged values
        were flushed to the loggers. In evaluation and prediction, it does so every ``log_every_n_steps`` micro-batches.
        The method must not wait for a device or another rank.

        Args:
            trainer: the run.
            module: the module of the run.
            batches: micro-batches completed in the epoch or evaluation.
        """


def folders_of(callbacks: Iterable[Callback]) -> list[str]:
    """Return the folders and URLs that callbacks write to, each once."""
    writing = (each for each in callbacks if isinstance(each, WritesFolders))
    return list(dict.fromkeys(folder for each in writing for folder in each.writes_to))
