"""Callback: what extends a run without touching the module or the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._distributed.shards import Region
    from drivetrain.run_context import RunContext, Trials


class Callback:
    """Base class of everything that extends a run. Nothing must be written: one that overrides nothing does nothing.

    What may be written are the hooks, `state_dict` and `load_state_dict`, and answers to what the engine asks
    (`save_before_leaving`, `writes_to`, `monitors`, ...), which all have a default. A hook nobody overrides is absent
    from the loop and costs nothing. A callback has no name for `Fit`: it is given as an object.

    Hooks are called in the order of ``docs/how-a-step-runs.md``: callbacks first, by descending `priority`, then the
    module. A callback with a negative priority runs after the module's own hook: it watches results (early stopping,
    checkpoints) and must see what the module logged.

    Every rank runs every callback, in the same order, so that collectives in user code pair up.

    ``trainer`` is the `Fit` that is running, as `RunContext` describes it. ``module`` is the `TrainModule` of the run;
    a callback for modules of one class may say so (``module: MyModule``).
    """

    _logging_module: weakref.ref[Any] | None = None

    priority: int = 0
    """Higher runs earlier; below zero runs after the module."""

    @property
    def state_key(self) -> str:
        """Identifies this callback's state in a checkpoint; must differ between two callbacks of one class."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: JSON-able values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def take_over(self, state_dict: Mapping[str, Any]) -> None:
        """Become what this callback was on rank 0, at the end of a run in other processes, which have ended too.

        Args:
            state_dict: what `state_dict` returned there; it is loaded, unless it is empty.
        """
        if state_dict:
            self.load_state_dict(state_dict)

    def save_tensors(self, trainer: RunContext, module: Any) -> Mapping[str, Any]:
        """Return the tensors that a checkpoint keeps of this callback as it keeps weights, by name.

        Each is written by the rank, or the ranks, that hold it, and read back in parts by any number of ranks under any
        strategy. Names, shapes and dtypes are alike on every rank. What is small, or alike everywhere, goes well with
        `state_dict`.

        Returns:
            Tensors that every rank holds whole, of which rank 0's count; DTensors; or a
            `drivetrain.strategies.ParameterShard` of what this rank holds, as ``trainer.strategy.shard_of`` returns
            for the values of ``trainer.strategy.model_state()``.
        """
        return {}

    def tensor_regions(self, trainer: RunContext, module: Any) -> Mapping[str, Region]:
        """Return which part this rank wants of the tensors that `save_tensors` gave, by name; of others it gets all.

        By default a tensor that is called like one of the module's is wanted as this rank holds that.
        """
        return trainer.strategy.model_regions()

    def load_tensors(self, trainer: RunContext, module: Any, tensors: Mapping[str, Any]) -> None:
        """Take back what `save_tensors` returned, after `load_state_dict`.

        Args:
            trainer: the run.
            module: what it trains, whose weights are loaded by now.
            tensors: by name; a `drivetrain.strategies.ParameterShard` where `tensor_regions` named a region.
        """

    def before_launch(self, trials: Trials) -> None:
        """Called first of all, where `Fit.fit` and its like were called, before processes are started for the run.

        For what has to be found out by trying, and changes what the module or the data module is built from: a learning
        rate, a batch size. Where ranks are there already, it is called on every rank. Callbacks that the module's
        ``configure_callbacks`` returns come later and are not called.

        Args:
            trials: runs a few steps of what was called for, and puts everything back.
        """

    # Logging

    def log(self, name: str, value: Any, **options: Any) -> None:
        """What `TrainModule.log` does, of the run that this callback is in.

        Raises:
            ConfigurationError: it is in none.
        """
        self._module_that_logs().log(name, value, **options)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """What `TrainModule.log_dict` does, of the run that this callback is in."""
        self._module_that_logs().log_dict(dictionary, **options)

    def _module_that_logs(self) -> Any:
        module = None if self._logging_module is None else self._logging_module()
        if module is None:
            raise ConfigurationError(
                f"{type(self).__name__}.log was called outside a run.",
                "values are kept by epoch of training, validation or test.",
                "call it from a hook, or hand numbers to a logger with trainer.log_metrics.",
            )
        return module

    # What the engine asks. The answers are alike on every rank.

    def save_before_leaving(self, trainer: RunContext, module: Any) -> bool:
        """Save what a later run goes on from, as this one ends before its time: for a signal, or ``max_time``.

        Every callback is asked, on every rank, between two windows. Write with `Fit.save_checkpoint`, or ask for it
        with `Fit.defer_save`: what was asked for is whole before the run ends.

        Returns:
            Whether this callback has saved, or asked for a save, by which the run can go on. Where all say False, a
            warning says that nothing is saved.
        """
        return False

    @property
    def writes_to(self) -> Sequence[str]:
        """Folders and fsspec URLs that this callback writes to, asked after `setup`.

        In a fit they are tried before the first step; ``ckpt_path="last"``, ``"best"`` and ``"auto"`` look for
        checkpoints in them.
        """
        return ()

    @property
    def wants_run_folder(self) -> bool:
        """Whether a fit without loggers has a folder, ``trainer.log_dir``, for this callback's sake."""
        return False

    @property
    def kept_checkpoints(self) -> Sequence[str]:
        """Paths of the checkpoints that this callback has written and keeps; a run goes back to a whole one of them."""
        return ()

    @property
    def best_model_path(self) -> str:
        """The best of them, which ``ckpt_path="best"`` means; "" where there is none."""
        return ""

    @property
    def saves_whole(self) -> bool:
        """Whether `kept_checkpoints` will hold such as a run can go back to: more than weights."""
        return False

    def before_going_back(self, trainer: RunContext, module: Any) -> None:
        """Called before the run goes back to an earlier checkpoint, whose state this callback is then given."""

    def after_going_back(self, trainer: RunContext, module: Any, path: str) -> None:
        """Called once the run has gone back to the checkpoint at ``path``; ``trainer.global_step`` is its step."""

    @property
    def monitors(self) -> Mapping[str, str]:
        """Names of logged values that this callback cannot do without, each with the words that the user asked in.

        One that nothing logs is told in the first step: ``{"val_loss": "EarlyStopping(monitor='val_loss')"}``.
        """
        return {}

    def window_of(self, epoch: int) -> int | None:
        """Micro-batches of a window in ``epoch``, where this callback changes them in the course of a run, or None.

        The steps of a run, and with them its schedules, are estimated by it.
        """
        return None

    def why_ended(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why the run whose checkpoint holds ``state_dict`` was ended by this callback; None where it was not.

        Such a run has nothing left to train.
        """
        return None

    def predicted_before(
        self, trainer: RunContext, module: Any
    ) -> Callable[[Sequence[Any] | None, int, int], bool] | None:
        """Return what tells of a batch whether this callback has its outputs from an earlier run.

        Asked once, by predict with ``return_predictions=False``. What all callbacks that answer have is not predicted
        again: neither the step nor a batch's hooks are called.

        Returns:
            ``there(indices, batch_idx, dataloader_idx)``, with what `RunContext.batch_indices` will be for the batch;
            None where there is nothing from before, on all ranks alike.
        """
        return None

    def write_line(self, text: str) -> bool:
        """Print ``text`` for ``trainer.print``, on rank 0, where this callback draws on the terminal.

        Returns:
            Whether it did; else ``trainer.print`` asks the next one, and prints it itself where nobody does.
        """
        return False

    def write_progress(self, trainer: RunContext, module: Any, batches: int) -> None:
        """Print a line of progress where it is time for one and nobody looks at a terminal.

        Called every ``log_every_n_steps`` optimizer steps of training, once what was logged has gone to the loggers,
        and after as many micro-batches of an evaluation or a prediction. It must not wait for a device or a rank.

        Args:
            trainer: the run.
            module: what is run.
            batches: micro-batches made of the epoch or the evaluation.
        """

    # The run

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Called first, on every rank; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Called last, also after a failure."""

    def on_exception(self, trainer: RunContext, module: Any, exception: BaseException) -> None:
        """Called when anything inside the run raised; the exception goes on afterwards."""

    def on_save_checkpoint(self, trainer: RunContext, module: Any, checkpoint: dict[str, Any]) -> None:
        """Add JSON-able values or tensors to ``checkpoint``, a dict of this callback's own."""

    def on_load_checkpoint(self, trainer: RunContext, module: Any, checkpoint: dict[str, Any]) -> None:
        """Read back what `on_save_checkpoint` added."""

    # Training

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
        """Called after an epoch's last micro-batch and validation; epoch metrics are reduced."""

    def on_train_batch_start(self, trainer: RunContext, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Called before a micro-batch; -1, returned on every rank, skips the rest of the epoch."""

    def on_train_batch_end(
        self, trainer: RunContext, module: Any, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Called after a micro-batch; ``outputs["loss"]`` is detached and unscaled."""

    def on_before_zero_grad(self, trainer: RunContext, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Called before a window's gradients are cleared."""

    def on_before_backward(self, trainer: RunContext, module: Any, loss: torch.Tensor) -> None:
        """Called with the loss as `training_step` returned it."""

    def on_after_backward(self, trainer: RunContext, module: Any) -> None:
        """Called after every backward."""

    def on_before_optimizer_step(self, trainer: RunContext, module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Called with unscaled gradients, before clipping and the step."""

    # Evaluation

    def on_validation_start(self, trainer: RunContext, module: Any) -> None:
        """Called before a validation run."""

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        """Called after a validation run; its metrics are reduced."""

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
        """Called after a test run; its metrics are reduced."""

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


def let_log(callback: Callback, module: Any) -> None:
    """Let ``callback.log`` write what ``module.log`` would, until it is called with None."""
    # A weak reference: a copy of the callback is not to bring a copy of the module along.
    callback.__dict__["_logging_module"] = None if module is None else weakref.ref(module)
