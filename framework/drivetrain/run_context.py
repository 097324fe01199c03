"""RunContext: the properties and methods of a run that modules, data modules, callbacks and loggers can use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.optim import Optimizer

# Needed for annotations only, and expensive to import.
if TYPE_CHECKING:
    from drivetrain._config.precedence import Settings
    from drivetrain.checkpoint.save_request import SaveRequest
    from drivetrain.environments import Environment
    from drivetrain.loggers import Logger
    from drivetrain.precision import Precision
    from drivetrain.profilers import Profiler
    from drivetrain.strategies.strategy import Strategy


class RunContext(Protocol):
    """A run, passed as ``trainer`` to the hooks of a `Callback`; modules and data modules read it as ``self.trainer``.

    The object is the `Fit`, and this interface declares the part of `Fit` that is useful within a run. Most arguments
    of `Fit` are attributes of the same name, and ``settings`` holds all of them.
    """

    # Progress

    @property
    def current_epoch(self) -> int:
        """The number of completed epochs. After training, the last epoch counts even if the run ended within it."""

    @property
    def global_step(self) -> int:
        """The number of completed optimizer steps."""

    @property
    def batch_idx(self) -> int:
        """The number of micro-batches of the current epoch that this rank has trained on."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that this rank has trained on."""

    @property
    def samples_seen(self) -> int:
        """The number of samples that all ranks together have trained on."""

    state: str
    """The state of the `Fit`: "idle", "fitting", "validating", "testing", "predicting", "finished" or "interrupted"."""

    @property
    def training(self) -> bool:
        """True in `Fit.fit`, except during validations."""

    @property
    def validating(self) -> bool:
        """True in `Fit.validate` and during the validations of `Fit.fit`, except in the sanity check."""

    @property
    def testing(self) -> bool:
        """True in `Fit.test`."""

    @property
    def predicting(self) -> bool:
        """True in `Fit.predict`."""

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check, the short validation before training."""

    @property
    def evaluating(self) -> bool:
        """True while the module is validated or tested, including the sanity check."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the training micro-batch is the last one of its epoch; False if the epoch's length is unknown."""

    @property
    def interrupted(self) -> bool:
        """Whether an error, Ctrl-C or a preemption signal ended the last run early."""

    @property
    def received_sigterm(self) -> bool:
        """Whether the run received SIGTERM, after which the run saves a checkpoint and exits."""

    @property
    def joining(self) -> bool:
        """True while this rank has no data left and only takes part in the collectives of the other ranks."""

    @property
    def batch_indices(self) -> Sequence[Any] | None:
        """The data-set indices of the samples of the batch that this rank predicts, in the order of the batch.

        None outside prediction, and None if samples have no indices: in iterable data sets, in loaders that do not
        batch automatically or that override ``__iter__``, and in several combined loaders.
        """

    @property
    def micro_batch_weight(self) -> float:
        """The number of items over which the loss of this rank's current training micro-batch is a mean.

        The weight is the result of `TrainModule.batch_weight` for the loader's batch, or by default the batch's number
        of samples. The weight is 0 on a joining rank. Manual optimization does not apply weights, and this property is
        then always the number of samples.
        """

    # Data

    @property
    def num_training_batches(self) -> int | float:
        """The number of micro-batches of an epoch on each rank; infinite if neither limits nor loaders give it."""

    @property
    def num_val_batches(self) -> list[int | float]:
        """The number of micro-batches of each validation loader."""

    @property
    def num_test_batches(self) -> list[int | float]:
        """The number of micro-batches of each test loader."""

    @property
    def num_predict_batches(self) -> list[int | float]:
        """The number of micro-batches of each prediction loader."""

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """The number of micro-batches of each validation loader in the sanity check."""

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates: the module has a ``validation_step``, and ``limit_val_batches`` is not 0."""

    @property
    def train_dataloader(self) -> Any:
        """The training loader(s) as passed; None in other stages."""

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader(s) as passed; None if there are none."""

    @property
    def test_dataloaders(self) -> Any:
        """The test loader(s) as passed; None in other stages."""

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader(s) as passed; None in other stages."""

    @property
    def evaluated_loaders(self) -> Sequence[Any]:
        """The loaders that the current validation, test or prediction reads, as a flat sequence."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments ``num_replicas`` and ``rank`` for your own `DistributedSampler`; None in a single process."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps of the whole run; infinite if neither limits nor the data bound it."""

    # The module, the data module and the checkpoint that the run started from

    @property
    def lightning_module(self) -> Any:
        """The `TrainModule` of this run or the last one; None before the first."""

    @property
    def module(self) -> Any:
        """Same as `lightning_module`."""

    @property
    def model(self) -> Any:
        """Same as `lightning_module`: the module itself, not a wrapper such as `DistributedDataParallel`."""

    @property
    def datamodule(self) -> Any:
        """The `DataModule` of this run or the last one; None if no data module was passed."""

    @property
    def ckpt_path(self) -> str | None:
        """The path of the checkpoint that the run started from ("last", "best" and "auto" are resolved), or None."""

    # Devices and ranks

    @property
    def strategy(self) -> Strategy:
        """The strategy. Before a run with "auto", this is the strategy for the expected number of processes."""

    @property
    def precision(self) -> Precision:
        """The precision in use."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def global_rank(self) -> int:
        """The rank of this process. Before a run, this is the rank that the environment assigns."""

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""

    @property
    def node_rank(self) -> int:
        """The index of this node."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""

    @property
    def num_devices(self) -> int:
        """The number of devices on this node, which is also the number of processes on this node."""

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices on this node; processes on the CPU count from 0."""

    @property
    def scaler(self) -> Any:
        """The precision's `GradScaler`; None if the precision does not scale the loss."""

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which modules are built in the run's dtype and, unless sharded, on the run's device.

        Args:
            empty_init: None or False; True is refused. Layers that are too large to initialize here are built in
                ``configure_model``.
        """

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors from all ranks; see `TrainModule.all_gather`. Collective."""

    # Logging

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """All logged values, by every name under which they can be monitored."""

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The latest values sent to the loggers."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest values logged with ``prog_bar=True``, as numbers. Reading this property waits for the device."""

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        """The values of `progress_bar_metrics` as tensors on their devices. Reading this property does not wait."""

    @property
    def evaluation_so_far(self) -> Mapping[str, torch.Tensor]:
        """Running means, on this rank, of the values that the current evaluation has logged with ``prog_bar=True``."""

    loggers: list[Logger]
    """The loggers, to all of which values are sent."""

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None. Setting this property replaces all loggers by the given one."""

    @logger.setter
    def logger(self, logger: Logger | None) -> None: ...

    def log_metrics(self, values: Mapping[str, torch.Tensor | float], step: int | None = None) -> None:
        """Send values to all loggers, in the order of the calls. Does nothing on ranks other than 0.

        The call does not wait for tensors on a GPU. A row with such tensors, and all rows after this row, reach the
        loggers once the tensors are copied to the host: at the latest before a checkpoint is written and at the end of
        the run.

        Args:
            values: numbers and one-element tensors by name.
            step: the optimizer step of the values; by default ``global_step``.
        """

    def finish_logging(self) -> None:
        """Wait for pending rows of `log_metrics` and pass them to the loggers. Does nothing on ranks other than 0."""

    def log_histogram(self, name: str, value: Any, step: int | None = None, bins: int = 64) -> None:
        """Send a histogram of values that are distributed over ranks to all loggers. Collective.

        Each rank counts the values of its part of the tensor in common bins, and the counts are summed, so no tensor is
        gathered. A parameter, a gradient of a parameter or a buffer of the module counts once, however the strategy
        replicates or shards the tensor. Any other tensor, such as the activations of a micro-batch, is assumed to
        differ between ranks, and the values of all ranks count.

        Args:
            name: the name of the histogram.
            value: a tensor of any shape, or a mapping from keys to tensors, each of which is logged as ``name/key``.
                None on a rank that has no part of the tensor.
            step: the optimizer step; by default ``global_step``.
            bins: the number of bins of equal width between the smallest and the largest finite value.
        """

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0, on a separate line above the progress bar."""

    # Profiling

    @property
    def profiler(self) -> Profiler:
        """The profiler of the run; without a profiler, an object whose spans do nothing.

        ``with self.trainer.profiler.profile("augmentation"): ...`` adds a phase to the profiler's table and trace.
        """

    @property
    def profiles(self) -> bool:
        """Whether `Fit` has a profiler."""

    # Callbacks, and requests to stop

    # The hooks of `Callback` are annotated with this protocol, so this module cannot import `Callback`.
    callbacks: list[Any]
    """The `Callback`s of all runs of this `Fit`, also the default ones. Others can be appended until set-up ends."""

    @property
    def checkpoint_callback(self) -> SavedCheckpoints | None:
        """The first callback that saves checkpoints; None if there is none."""

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All callbacks that save checkpoints."""

    @property
    def early_stopping_callback(self) -> Any:
        """The first `EarlyStopping` callback; None if there is none."""

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All `EarlyStopping` callbacks."""

    @property
    def progress_bar_callback(self) -> Any:
        """The first `ProgressBar` callback; None if there is none."""

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end early. If any rank sets this property, all ranks stop after the same step."""

    @should_stop.setter
    def should_stop(self, value: bool) -> None: ...

    def request_stop(self, because: str) -> None:
        """Set `should_stop` with a reason, which is logged as the run ends.

        Args:
            because: the reason with its values, such as "val_loss is above 3".
        """

    def stop_unless_withdrawn(self, owner: object, because: str | None) -> None:
        """Request a stop that is obeyed once ``min_steps`` and ``min_epochs`` are reached, or withdraw it.

        Call this method on all ranks at the same time, with the same decision.

        Args:
            owner: the callback that requests or withdraws.
            because: the reason with its values, such as "val_loss did not improve"; None withdraws the request.
        """

    # The run's folder

    @property
    def log_dir(self) -> str | None:
        """The folder of this run or the last one, as a path or URL equal on every rank; None if the run has no folder.

        The folder holds the loggers' files, ``checkpoints/``, ``logs/`` and ``run.json``; see docs/runs.md. The folder
        of an evaluation is created when a logger first writes to it.
        """

    @property
    def run_id(self) -> str:
        """The identifier of the run in `log_dir`, kept if the run is resumed in its folder; "" without a folder."""

    # Checkpoints

    def save_checkpoint(
        self, path: str | os.PathLike[str], weights_only: bool = False, trainable_only: bool = False
    ) -> None:
        """Write a checkpoint. Collective: call this method on every rank.

        A checkpoint holds a state from which a run resumes exactly. Within an epoch, from its first batch to
        ``on_train_epoch_end``, it is therefore written after this method has returned: when the accumulation window has
        ended and all hooks of the current event have run. In ``on_exception`` the state before the step that failed is
        written, if `Checkpoint(save_on_exception=True)` keeps it. Elsewhere the checkpoint is written at once.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out the state that only a resumed run needs.
            trainable_only: store only checksums of parameters that have never trained.
        """

    def save(self, request: SaveRequest | Callable[[], SaveRequest | None]) -> None:
        """Write a checkpoint at the next point from which the run can be resumed. Call this method on every rank.

        Within an epoch the point is reached when all hooks of the current event have run and the accumulation window is
        closed; elsewhere it is now. In ``on_exception`` the state before the step that failed is written, if the run
        has one process and `Checkpoint(save_on_exception=True)` keeps that state.

        Args:
            request: the checkpoint, or a function that returns it, or None to write nothing. A function is called when
                the point is reached and all hooks of the current event have run.

        Raises:
            CheckpointError: the checkpoint could not be written. The error is raised on every rank.
        """

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        """Return the path and step of this run's newest complete checkpoint that is not after ``step``, or None.

        Waits for a checkpoint that is being written. Collective.
        """

    def roll_back(self, path: str) -> None:
        """Load a complete checkpoint of this run and continue training from it. Call this method on every rank.

        The checkpoint is loaded when all hooks of the current event have run and the accumulation window is closed.
        Later checkpoints of the run's `Checkpoint` callbacks are deleted.

        Raises:
            CheckpointError: the checkpoint cannot be opened.
        """

    def checkpoint_removed(self, identifier: str) -> None:
        """Record that a checkpoint was deleted. ``identifier`` is the identifier in the checkpoint's manifest."""

    # Optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""

    @property
    def lr_schedulers(self) -> list[Any]:
        """The learning rate schedulers."""

    @property
    def scheduler_configs(self) -> Sequence[ScheduledRate]:
        """Each learning rate scheduler, with the interval at which it steps."""

    @property
    def lr_scheduler_configs(self) -> Sequence[ScheduledRate]:
        """Same as `scheduler_configs`."""

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The total norm of gradients before the last clipping, of shape (); None if none were clipped yet."""

    # Members that methods of `TrainModule` call

    @property
    def metrics(self) -> Records:
        """The store to which `TrainModule.log` writes."""

    @property
    def optimizer_handles(self) -> Sequence[Any]:
        """The handles that ``self.optimizers()`` returns in a module. Each handle has its optimizer's attributes."""

    def manual_step(self, what: str, does: str) -> ManualOptimization:
        """Return the training step of manual optimization.

        Args:
            what: the name of the calling method, for the error that is raised in automatic optimization.
            does: the action of the engine in automatic optimization, such as "runs backward on", for the same error.
        """

    def manual_backward(self, loss: torch.Tensor) -> None:
        """Run backward on a loss of shape (); see `TrainModule.manual_backward`."""

    def pass_over_training_data(self) -> None:
        """Call ``training_step`` on an epoch of the training data without training. Collective.

        The pass computes no gradients, calls no hooks, logs nothing and leaves the module in its mode. Its purpose is
        to update statistics, such as those of batch normalization after weights were replaced. Call this method from
        ``on_train_end``, because a pass within an epoch would move the position in the data.
        """

    def clip_gradients(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        """Clip the gradients of an optimizer; see `TrainModule.clip_gradients`."""

    # The settings, each of which is documented as an argument of `Fit`

    settings: Settings
    """Every argument of `Fit`, with the source of its value: code, environment, file or default."""

    accelerator: str
    devices: int | str | list[int]
    num_nodes: int
    environment: str | Environment
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: str | dict[str, float] | timedelta | None
    accumulate_grad_batches: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: str
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    val_check_interval: int | float | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    overfit_batches: int | float
    fast_dev_run: bool | int
    log_every_n_steps: int
    enable_checkpointing: bool
    default_root_dir: str
    seed: int | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    detect_anomaly: bool
    compile: bool | dict[str, Any]
    use_distributed_sampler: bool
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    preemption_signals: str | list[str] | None
    barebones: bool

    searched: set[str]
    """Names of hyper-parameters that a finder, such as `LearningRateFinder`, sets."""

    built_unseeded: bool
    """Whether the module of a run with ``Fit(seed=)`` was built before the process was seeded."""


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

    ckpt_path: str | None
    """The checkpoint passed to the call, or None."""

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


class SavedCheckpoints(Protocol):
    """The checkpoints that a callback, such as `Checkpoint`, has saved."""

    dirpath: str | None
    """The path or URL of the checkpoints' folder; None until the run has chosen a folder."""

    @property
    def best_model_path(self) -> str:
        """The path of the best kept checkpoint; "" if there is none."""

    @property
    def best_model_score(self) -> float | None:
        """The monitored value of the best kept checkpoint; None if nothing is monitored."""

    @property
    def current_score(self) -> float | None:
        """The monitored value of the newest checkpoint; None if nothing is monitored."""

    @property
    def last_model_path(self) -> str:
        """The path of the newest kept checkpoint; "" if there is none."""


class ScheduledRate(Protocol):
    """A learning-rate scheduler, with the interval at which it steps."""

    scheduler: Any
    """The scheduler."""

    interval: str
    """The unit of the interval: "epoch" or "step" (optimizer steps)."""

    name: str | None
    """The name under which `LearningRateMonitor` logs the rate; None for a default name."""


class Records(Protocol):
    """Stores logged values."""

    def record(
        self,
        name: str,
        value: Any,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        logger: bool,
        reduce_fx: Any,
        batch_size: int | None,
        sync_dist: bool | None,
        add_dataloader_idx: bool,
        metric_attribute: str | None,
    ) -> None:
        """Store one value; see `TrainModule.log`."""

    def reduced_at(self, name: str) -> int | None:
        """Return the global step at which a logged value was reduced; None for the value of a step. Collective."""

    def logged_at(self, name: str) -> int | None:
        """Return the global step at which a value was logged or reduced; None if it is not known. Collective."""

    def restore(self, values: dict[str, float]) -> None:
        """Add values to `RunContext.callback_metrics`, the same on every rank, without logging them."""


class ManualOptimization(Protocol):
    """The training step of manual optimization: runs backward, and toggles the optimizers' parameters."""

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss of shape ()."""

    def toggle(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients."""

    def untoggle(self, optimizer: Any) -> None:
        """Restore ``requires_grad`` of all parameters to the values from before `toggle`."""
