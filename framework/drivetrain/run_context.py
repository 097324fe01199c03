"""RunContext: what modules, data modules, callbacks and loggers can read and call of their run."""

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
    from drivetrain.environments import Environment
    from drivetrain.loggers import Logger
    from drivetrain.precision import Precision
    from drivetrain.profilers import Profiler
    from drivetrain.strategies.strategy import Strategy


class RunContext(Protocol):
    """The run: ``trainer`` in the hooks of a `Callback`, and ``self.trainer`` in a module or a data module.

    The object is the `Fit`; this interface is the part of it that is useful within a run. Most arguments of `Fit` are
    attributes of the same name, and all of them are in ``settings``.
    """

    # Progress

    @property
    def current_epoch(self) -> int:
        """Epochs completed. After training it includes an epoch that ``max_steps`` or a request to stop cut short."""

    @property
    def global_step(self) -> int:
        """Optimizer steps made."""

    @property
    def batch_idx(self) -> int:
        """Micro-batches of the current epoch that this rank has trained on."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches trained on by this rank."""

    @property
    def samples_seen(self) -> int:
        """Samples trained on by all ranks together."""

    state: str
    """"idle", "fitting", "validating", "testing", "predicting", "finished" or "interrupted"."""

    @property
    def training(self) -> bool:
        """True in `Fit.fit`, except during its validations."""

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
        """True while batches are validated or tested, also in the sanity check."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the training micro-batch is the last one of its epoch; False if the epoch's length is unknown."""

    @property
    def interrupted(self) -> bool:
        """Whether an error, Ctrl-C or a preemption signal ended the last run early."""

    @property
    def received_sigterm(self) -> bool:
        """Whether the run received SIGTERM and is going to save and exit."""

    @property
    def joining(self) -> bool:
        """True while this rank has no data left and only takes part in the collectives of the others."""

    @property
    def batch_indices(self) -> Sequence[Any] | None:
        """The data-set indices of the samples of the batch that this rank predicts, in the order of the batch.

        None outside prediction and if samples have no indices: with iterable data sets, with loaders that do not batch
        automatically or override ``__iter__``, and with several loaders combined.
        """

    # Data

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on each rank, from limits and ``len(loader)``; infinite if neither is known."""

    @property
    def num_val_batches(self) -> list[int | float]:
        """Micro-batches of each validation loader."""

    @property
    def num_test_batches(self) -> list[int | float]:
        """Micro-batches of each test loader."""

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Micro-batches of each prediction loader."""

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Micro-batches of each validation loader in the sanity check."""

    @property
    def enable_validation(self) -> bool:
        """Whether this is a fit whose module has a ``validation_step`` and ``limit_val_batches`` is not 0."""

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
        """The loaders of validation, test or prediction, as a flat sequence."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments ``num_replicas`` and ``rank`` for your own `DistributedSampler`; None in a single process."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run; infinite if nothing bounds it."""

    # The module and its data

    @property
    def lightning_module(self) -> Any:
        """The `TrainModule` of this run or the last one; None before the first."""

    @property
    def module(self) -> Any:
        """Same as `lightning_module`."""

    @property
    def model(self) -> Any:
        """Same as `lightning_module`; never a wrapper."""

    @property
    def datamodule(self) -> Any:
        """The `DataModule` of this run or the last one, if it has one."""

    @property
    def ckpt_path(self) -> str | None:
        """The path of the checkpoint that the run started from, with "last", "best" and "auto" resolved; or None."""

    # Devices and ranks

    @property
    def strategy(self) -> Strategy:
        """The strategy; before a run with "auto", the one for the expected number of processes."""

    @property
    def precision(self) -> Precision:
        """The precision in use."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    @property
    def global_rank(self) -> int:
        """The rank of this process; before a run, the rank that the environment gives it."""

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
        """The number of devices, and so of processes, on this node."""

    @property
    def device_ids(self) -> list[int]:
        """The indices of these devices; processes on the CPU count from 0."""

    @property
    def scaler(self) -> Any:
        """The precision's `GradScaler`, if it has one."""

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which modules are built in the run's dtype and, unless sharded, on its device.

        Args:
            empty_init: True is refused; build layers that are too large to initialize in ``configure_model``.
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
        """The latest values logged with ``prog_bar=True``, as numbers: reading them waits for the device."""

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        """The values of `progress_bar_metrics` as tensors on their devices: reading them does not wait."""

    @property
    def evaluation_so_far(self) -> Mapping[str, torch.Tensor]:
        """Running means on this rank of what the current evaluation has logged with ``prog_bar=True``."""

    loggers: list[Logger]
    """The loggers."""

    @property
    def logger(self) -> Logger | None:
        """The first logger. Setting it replaces them all."""

    @logger.setter
    def logger(self, logger: Logger | None) -> None: ...

    def log_metrics(self, values: Mapping[str, torch.Tensor | float], step: int | None = None) -> None:
        """Send values to all loggers, in the order of the calls. Does nothing on ranks other than 0.

        Does not wait for tensors on a GPU: their row and the rows after it reach the loggers once they are copied to
        the host, at the latest before a checkpoint is written and at the end of the run.

        Args:
            values: numbers and one-element tensors by name.
            step: the optimizer step of the values; by default ``global_step``.
        """

    def finish_logging(self) -> None:
        """Wait for pending rows of `log_metrics` and pass them to the loggers. On rank 0 only."""

    def log_histogram(self, name: str, value: Any, step: int | None = None, bins: int = 64) -> None:
        """Send a histogram of values that are distributed over ranks to all loggers. Collective.

        Each rank counts its part in common bins, and the counts are summed: no tensor is gathered. A parameter, its
        gradient or a buffer of the module counts once, however the strategy replicates or shards it. Any other tensor,
        such as the activations of a micro-batch, is assumed to differ between ranks, and all of them count.

        Args:
            name: the name of the histogram.
            value: a tensor of any shape, or tensors by key, which are logged as ``name/key``; None on a rank that has
                no part of a tensor.
            step: the optimizer step; by default ``global_step``.
            bins: the number of bins of equal width between the smallest and the largest finite value.
        """

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0, on a line of its own above the progress bar."""

    # Profiling

    @property
    def profiler(self) -> Profiler:
        """The profiler of the run; without one, an object whose spans do nothing.

        ``with self.trainer.profiler.profile("augmentation"): ...`` adds a phase to the table and the trace.
        """

    @property
    def profiles(self) -> bool:
        """Whether `Fit` has a profiler."""

    # Callbacks, and the end of the run

    # Callback's hooks are annotated with this protocol, which therefore cannot import Callback.
    callbacks: list[Any]
    """The `Callback`s of every run, with the default ones. Others can be appended until set-up ends."""

    @property
    def checkpoint_callback(self) -> SavedCheckpoints | None:
        """The first callback that saves checkpoints."""

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All callbacks that save checkpoints."""

    @property
    def early_stopping_callback(self) -> Any:
        """The first `EarlyStopping`, if there is one."""

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All `EarlyStopping` callbacks."""

    @property
    def progress_bar_callback(self) -> Any:
        """The first `ProgressBar`, if there is one."""

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end early. Set it on any rank; all ranks then stop after the same step."""

    @should_stop.setter
    def should_stop(self, value: bool) -> None: ...

    def ask_to_stop(self, because: str) -> None:
        """Set `should_stop` with a reason, which is logged as the run ends.

        Args:
            because: the reason with its values, such as "val_loss is above 3".
        """

    # The run's folder

    @property
    def log_dir(self) -> str | None:
        """The folder of this run or the last one, a path or URL, the same on every rank; None if it has none.

        It holds the loggers' files, ``checkpoints/``, ``logs/`` and ``run.json``; see docs/runs.md. The folder of an
        evaluation exists once a logger has written to it.
        """

    @property
    def run_id(self) -> str:
        """The identifier of that run, which stays the same if it is resumed in its folder; "" without a folder."""

    def checkpoint_removed(self, identifier: str) -> None:
        """Record that the checkpoint with this identifier in its manifest was deleted."""

    @property
    def micro_batch_weight(self) -> float:
        """The number of items over which the loss of this rank's current training micro-batch is a mean.

        It is the result of `TrainModule.batch_weight` for the loader's batch, or by default its number of samples; 0 on
        a joining rank. Manual optimization does not apply weights, and always has the number of samples.
        """

    # Checkpoints

    def save_checkpoint(
        self, path: str | os.PathLike[str], weights_only: bool = False, trainable_only: bool = False
    ) -> None:
        """Write a checkpoint. Collective: call it on every rank.

        Within an accumulation window it is written at the window's end, since checkpoints hold no gradients.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out what only a resumed run needs.
            trainable_only: store only checksums of parameters that have never trained.
        """

    def defer_save(self, save: Callable[[], None]) -> None:
        """Call ``save`` at the next point from which the run can be resumed exactly. Call it on every rank.

        That point is reached when all hooks of the current event have run and the accumulation window is closed.
        """

    def write_checkpoint(
        self,
        path: str,
        weights_only: bool = False,
        background: bool = False,
        then: Callable[[], None] = lambda: None,
        identifier: str = "",
        digest: str | None = None,
        trainable_only: bool = False,
    ) -> None:
        """Write a checkpoint now; to be called by the function passed to `defer_save`, as `Checkpoint` does.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out what only a resumed run needs.
            background: copy the state, and write it while training continues.
            then: called on every rank once the checkpoint is complete.
            identifier: the identifier in its manifest; "" for a random one. Rank 0's value is used.
            digest: the digest to store for each file: "sha256", or None for checksums only. Rank 0's value is used.
            trainable_only: store only checksums of parameters that have never trained.

        Raises:
            CheckpointError: on every rank: it could not be written.
        """

    def save_after_failure(self, path: str, digest: str | None = None, trainable_only: bool = False) -> None:
        """Save the state of a failed run of one process as of its last step; for ``on_exception`` only.

        Args:
            path: a path or an fsspec URL.
            digest: as for `write_checkpoint`.
            trainable_only: as for `write_checkpoint`.
        """

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        """Return the path and step of this run's newest complete checkpoint that is not after ``step``, or None.

        Waits for a checkpoint that is being written. Collective.
        """

    def roll_back(self, path: str) -> None:
        """Load a complete checkpoint of this run and continue training from it. Call it on every rank.

        It is loaded when all hooks of the current event have run and the accumulation window is closed. Later
        checkpoints of the run's `Checkpoint` callbacks are deleted.

        Raises:
            CheckpointError: it cannot be opened.
        """

    # Optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""

    @property
    def lr_schedulers(self) -> list[Any]:
        """The learning rate schedulers."""

    @property
    def scheduler_configs(self) -> Sequence[ScheduledRate]:
        """The schedulers and when they step."""

    @property
    def lr_scheduler_configs(self) -> Sequence[ScheduledRate]:
        """Same as `scheduler_configs`."""

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The total norm before gradients were last clipped, of shape (); None if nothing was clipped."""

    # What the methods of `TrainModule` use

    @property
    def metrics(self) -> Records:
        """The store to which `TrainModule.log` writes."""

    @property
    def optimizer_handles(self) -> Sequence[Any]:
        """What ``self.optimizers()`` returns in a module: each handle has its optimizer's attributes."""

    def manual_step(self, what: str, does: str) -> ManualOptimization:
        """Return the training step of manual optimization.

        Args:
            what: the method that needs it, for the error in automatic optimization.
            does: what the engine itself does in automatic optimization, for the same error.
        """

    def manual_backward(self, loss: torch.Tensor) -> None:
        """Run backward on a loss of shape (); see `TrainModule.manual_backward`."""

    def pass_over_training_data(self) -> None:
        """Call ``training_step`` on an epoch of the training data without training. Collective.

        There are no gradients, hooks or logging, and the module stays in its mode: this updates statistics, such as
        those of batch normalization after weights were replaced. Call it from ``on_train_end``: within an epoch it
        would move the position in the data.
        """

    def clip_gradients(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        """Clip the gradients of an optimizer; see `TrainModule.clip_gradients`."""

    # The settings, which `Fit` documents

    settings: Settings
    """Every argument, with the source of its value: code, environment, file or default."""

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
    """Names of hyper-parameters that a finder sets."""

    built_unseeded: bool
    """Whether ``Fit(seed=)`` runs a module that was built before the process was seeded."""


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
            callback: observes the trial and may change the optimizer's settings. Its ``state_dict`` is loaded into the
                caller's object if the trial ran in other processes.
            steps: optimizer steps; in stages other than fit, micro-batches of each loader.
            prepare: called with the copies of the module and of the data module (or None), and `loaders`; may change
                the copies, and returns the loaders to use.

        Raises:
            Exception: the trial failed on this rank or another; all state is restored.
        """

    def fits(self, callback: Any, steps: int, prepare: Callable[[Any, Any, Any], Any] | None = None) -> bool:
        """Run a trial as `run` does; return whether it fits.

        False means that a rank ran out of memory, or that the data has no batch of that size.
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
    """Their folder or URL; None until the run has chosen one."""

    @property
    def best_model_path(self) -> str:
        """The path of the best kept checkpoint; "" if there is none."""

    @property
    def best_model_score(self) -> float | None:
        """Its monitored value; None if nothing is monitored."""

    @property
    def current_score(self) -> float | None:
        """The monitored value of the newest checkpoint; None if nothing is monitored."""

    @property
    def last_model_path(self) -> str:
        """The path of the newest kept checkpoint; "" if there is none."""


class ScheduledRate(Protocol):
    """A learning-rate scheduler and when it steps."""

    scheduler: Any
    """The scheduler."""

    interval: str
    """"epoch" or "step" (optimizer steps)."""

    name: str | None
    """The name that `LearningRateMonitor` logs it under."""


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


class ManualOptimization(Protocol):
    """Runs backward and toggles optimizers if ``training_step`` itself steps them."""

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss of shape ()."""

    def toggle(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients."""

    def untoggle(self, optimizer: Any) -> None:
        """Restore which parameters required gradients before `toggle`."""
