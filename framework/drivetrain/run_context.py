"""RunContext: what a module, a data module, a callback or a logger may read and call of the run it is in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.optim import Optimizer

# For annotations alone, so that this file costs next to nothing to import.
if TYPE_CHECKING:
    from drivetrain._config.precedence import Settings
    from drivetrain.environments import Environment
    from drivetrain.loggers import Logger
    from drivetrain.precision import Precision
    from drivetrain.profilers import Profiler
    from drivetrain.strategies.strategy import Strategy


class RunContext(Protocol):
    """The run, as ``trainer`` in a hook of a `Callback` and as ``self.trainer`` in a module or a data module.

    It is the `Fit` that is running; this is the part of it that is good for something within a run. Most arguments
    of `Fit` are read by their names, too, and all of them in ``settings``.
    """

    # Where the run is

    @property
    def current_epoch(self) -> int:
        """Epochs completed; once training is over, one that ``max_steps`` or a request to stop has cut short counts."""

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
        """True in `Fit.fit`, but for its validations."""

    @property
    def validating(self) -> bool:
        """True in `Fit.validate`, and during the validations of `Fit.fit`, the sanity check apart."""

    @property
    def testing(self) -> bool:
        """True in `Fit.test`."""

    @property
    def predicting(self) -> bool:
        """True in `Fit.predict`."""

    @property
    def sanity_checking(self) -> bool:
        """True during the validation that is tried before training."""

    @property
    def evaluating(self) -> bool:
        """True wherever batches are validated or tested, in the sanity check too."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the training micro-batch is its epoch's last one; False where nothing says how many there are."""

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended before its time: an error, Ctrl-C, or a signal to save and leave."""

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM asks the run to save and leave."""

    @property
    def joining(self) -> bool:
        """True while this rank has no data and only keeps the others company."""

    @property
    def batch_indices(self) -> Sequence[Any] | None:
        """The data-set indices of the samples of the batch that this rank predicts, in the order of the batch.

        None outside of prediction, and where samples have no indices: of iterable data sets, of loaders without
        automatic batching or with an ``__iter__`` of their own, and of several loaders combined.
        """

    # How much there is

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on each rank, by limits and ``len(loader)``; infinite where neither says."""

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
        """Micro-batches of each validation loader that are tried before training."""

    @property
    def enable_validation(self) -> bool:
        """Whether a fit's module has a ``validation_step``, and ``limit_val_batches`` leaves it batches."""

    @property
    def train_dataloader(self) -> Any:
        """The training loader(s), as they were given; None in other stages."""

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or the collection of them, as it was given; None where there is none."""

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, or the collection of them, as it was given; None in other stages."""

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader, or the collection of them, as it was given; None in other stages."""

    @property
    def evaluated_loaders(self) -> Sequence[Any]:
        """The loaders that are validated on, tested or predicted on, one by one."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """What a `DistributedSampler` of one's own needs, ``num_replicas`` and ``rank``; None in a single process."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run; infinite where nothing bounds it."""

    # What is run

    @property
    def lightning_module(self) -> Any:
        """The `TrainModule` of the run, or of the last one; None before any."""

    @property
    def module(self) -> Any:
        """The same."""

    @property
    def model(self) -> Any:
        """The same: never a wrapper."""

    @property
    def datamodule(self) -> Any:
        """The `DataModule` of the run, or of the last one; None where it has none."""

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the run began with, as it was found; None where it began with none."""

    # Among whom

    @property
    def strategy(self) -> Strategy:
        """The strategy; before a run, with "auto", the one that this process would use by what is known then."""

    @property
    def precision(self) -> Precision:
        """The precision in use."""

    @property
    def world_size(self) -> int:
        """How many processes run together."""

    @property
    def global_rank(self) -> int:
        """This process among all; before a run, as far as those who started it have said."""

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""

    @property
    def node_rank(self) -> int:
        """This node among all."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""

    @property
    def num_devices(self) -> int:
        """How many processes of this node compute, each on a device of its own."""

    @property
    def device_ids(self) -> list[int]:
        """The indices of their devices; processes on the CPU are counted from 0."""

    @property
    def scaler(self) -> Any:
        """The precision's `GradScaler`; None where it has none."""

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Within it a module is built in the dtype and, where a device holds it whole, on the device of the coming run.

        Args:
            empty_init: True is refused: what is too large to be initialised is built in ``configure_model``.
        """

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """What `TrainModule.all_gather` does."""

    # What was logged, and where it goes

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Everything logged, by every name it is known by."""

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The latest values that went to the loggers."""

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest values logged with ``prog_bar=True``, as numbers: reading them waits for the device."""

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        """The same where they are: nothing waits for the device."""

    @property
    def evaluation_so_far(self) -> Mapping[str, torch.Tensor]:
        """What the evaluation under way has logged with ``prog_bar=True``, as of now on this rank: means so far."""

    loggers: list[Logger]
    """Where numbers go."""

    @property
    def logger(self) -> Logger | None:
        """The first logger. Setting it replaces them all."""

    @logger.setter
    def logger(self, logger: Logger | None) -> None: ...

    def log_metrics(self, values: Mapping[str, torch.Tensor | float], step: int | None = None) -> None:
        """Send numbers to all loggers, in the order of the calls. On rank 0 only.

        Nothing waits for a tensor on a GPU: its row, and those after it, reach the loggers once it has come over, at
        the latest before a checkpoint is written and at the end of the run.

        Args:
            values: numbers and one-element tensors by name.
            step: the optimizer step that they belong to; None is ``global_step``.
        """

    def finish_logging(self) -> None:
        """Wait for what `log_metrics` was given, and hand it to the loggers. On rank 0 only."""

    def log_histogram(self, name: str, value: Any, step: int | None = None, bins: int = 64) -> None:
        """Send the distribution of numbers that are spread over ranks to all loggers. Collective.

        Each rank counts what it holds, between edges that all agree on, and the counts are summed: nothing is gathered.
        A parameter, its gradient or a buffer of the module counts once, however the strategy lays it out. Of any
        other tensor each rank has a part of its own (activations of its micro-batch, say), and all parts count.

        Args:
            name: its name.
            value: a tensor of any shape, or tensors by name, which are called ``name/theirs``; None in place of one
                that a rank has nothing of.
            step: the optimizer step; None is ``global_step``.
            bins: of equal width, between the smallest and the largest finite number.
        """

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0, on a line of its own above the progress bar."""

    # Profiling

    @property
    def profiler(self) -> Profiler:
        """What measures the run; where `Fit` was given none, one whose spans do nothing.

        ``with self.trainer.profiler.profile("augmentation"): ...`` is a phase of its own in the table and the trace.
        """

    @property
    def profiles(self) -> bool:
        """Whether `Fit` was given a profiler."""

    # Callbacks, and the end of the run

    # A Callback's hooks name this protocol, which therefore cannot name Callback. Whoever looks for one among them asks
    # for its class.
    callbacks: list[Any]
    """The `Callback`s of every run, the default ones included. Others may be appended until the set-up is through."""

    @property
    def checkpoint_callback(self) -> SavedCheckpoints | None:
        """The first callback that saves checkpoints."""

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All of them."""

    @property
    def early_stopping_callback(self) -> Any:
        """The first `EarlyStopping`; None where there is none."""

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All of them."""

    @property
    def progress_bar_callback(self) -> Any:
        """The first `ProgressBar`; None where there is none."""

    @property
    def should_stop(self) -> bool:
        """Set it, on any rank, to end the run early; all ranks then stop after the same step."""

    @should_stop.setter
    def should_stop(self, value: bool) -> None: ...

    def ask_to_stop(self, because: str) -> None:
        """Set `should_stop`, and say why: the run ends with a line that tells it.

        Args:
            because: the reason, with its numbers: "val_loss is above 3".
        """

    # The run's folder

    @property
    def log_dir(self) -> str | None:
        """The folder of the run that is under way, or of the last one, alike on every rank; None where it has none.

        An evaluation's is there once a logger has written to it.

        It holds the loggers' files, ``checkpoints/``, ``logs/`` and ``run.json``; see docs/runs.md. A path or URL.
        """

    @property
    def run_id(self) -> str:
        """What tells that run from all others, the same when it is gone on with in its folder; "" where it has none."""

    def checkpoint_removed(self, identifier: str) -> None:
        """Note in the run's record that a checkpoint, by its manifest's identifier, is no longer kept."""

    @property
    def micro_batch_weight(self) -> float:
        """Over how many items the loss of the current training micro-batch is a mean, on this rank.

        That is what `TrainModule.batch_weight` returned for the batch as the loader gave it, else its samples; 0 where
        this rank only joins. In manual optimization, where weights are not applied, it is the samples.
        """

    # Checkpoints

    def save_checkpoint(
        self, path: str | os.PathLike[str], weights_only: bool = False, trainable_only: bool = False
    ) -> None:
        """Write a checkpoint. Collective: call it on every rank.

        Within an accumulation window, whose gradients no checkpoint holds, it is written at the window's end.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out what a run needs to go on.
            trainable_only: leave out parameters that have never trained, but for checksums by which they are known.
        """

    def defer_save(self, save: Callable[[], None]) -> None:
        """Call ``save`` as soon as the run could be resumed exactly; ask on every rank alike.

        That is once all hooks of the event are through, the module's too, and the accumulation window is closed.
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
        """Write a checkpoint now, from what was given to `defer_save`; see `Checkpoint` for what it is good for.

        Args:
            path: a path or an fsspec URL.
            weights_only: leave out what a run needs to go on.
            background: copy the state, and write it while training goes on.
            then: called on every rank once it is whole.
            identifier: what its manifest says of it, by which it is known later; "" lets one be drawn. Rank 0's counts.
            digest: of each file, for the manifest: "sha256", or None for checksums alone. Rank 0's counts.
            trainable_only: leave out parameters that have never trained, but for checksums by which they are known.

        Raises:
            CheckpointError: on every rank, where it could not be written.
        """

    def save_after_failure(self, path: str, digest: str | None = None, trainable_only: bool = False) -> None:
        """Write what a failed run of one process had as of its last step; from ``on_exception`` only.

        Args:
            path: a path or an fsspec URL.
            digest: as for `write_checkpoint`.
            trainable_only: as for `write_checkpoint`.
        """

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        """Return the newest whole checkpoint of this run without any optimizer step after ``step``, and its own step.

        Waits for one that is being written. Collective.
        """

    def roll_back(self, path: str) -> None:
        """Go back to a checkpoint of this run, a whole one, and train on from there; ask on every rank alike.

        That is once all hooks of the event are through and the accumulation window is closed. What the run's
        `Checkpoint` callbacks wrote since goes.

        Raises:
            CheckpointError: it cannot be opened.
        """

    # Optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""

    @property
    def lr_schedulers(self) -> list[Any]:
        """The schedulers."""

    @property
    def scheduler_configs(self) -> Sequence[ScheduledRate]:
        """The schedulers and when they step."""

    @property
    def lr_scheduler_configs(self) -> Sequence[ScheduledRate]:
        """The same."""

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The total norm before the last clipping, of shape (); None where nothing was clipped."""

    # What `TrainModule`'s own methods go through

    @property
    def metrics(self) -> Records:
        """Where `TrainModule.log` writes."""

    @property
    def optimizer_handles(self) -> Sequence[Any]:
        """What ``self.optimizers()`` gives in a module: each has its optimizer's attributes."""

    def manual_step(self, what: str, does: str) -> ManualOptimization:
        """What runs manual optimization; refuses ``what`` elsewhere, where the engine ``does`` it."""

    def manual_backward(self, loss: torch.Tensor) -> None:
        """What `TrainModule.manual_backward` does, with a loss of shape ()."""

    def pass_over_training_data(self) -> None:
        """Call ``training_step`` on an epoch of the training data, and train nothing. Collective.

        Without gradients, hooks or logging, in the mode that the module is in: for statistics, such as those of batch
        normalisation, of weights that were put in the module. Call it from ``on_train_end``, where no epoch is under
        way whose place in the data it would move.
        """

    def clip_gradients(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        """What `TrainModule.clip_gradients` does."""

    # The settings, which `Fit` explains

    settings: Settings
    """Every argument with where its value came from: code, environment, file or default."""

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
    """Names of hyper-parameters that a search sets."""

    built_unseeded: bool
    """Whether ``Fit(seed=)`` was given a module that had been built in a process that nobody had seeded."""


class Trials(Protocol):
    """Runs parts of what `Fit.fit` and its like were called for before it begins, and leaves everything as it was."""

    stage: str
    """"fit", "validate", "test" or "predict"."""

    module: Any
    """The user's module, as the call was given it. A trial runs a copy."""

    datamodule: Any
    """The user's data module, or None. A trial runs a copy."""

    loaders: Any
    """What the call was given to train on, or to evaluate; None where they come from elsewhere."""

    ckpt_path: str | None
    """What the call was to go on from."""

    is_dry_run: bool
    """Whether ``fast_dev_run`` is on."""

    def run(self, callback: Any, steps: int, prepare: Callable[[Any, Any, Any], Any] | None = None) -> None:
        """Run so many steps on copies, with ``callback`` and no other one, no logger and no checkpoint. Collective.

        Args:
            callback: watches, and may change the optimizer's settings. What its ``state_dict`` returns comes back.
            steps: optimizer steps; of other stages than fit, micro-batches of each loader.
            prepare: is given the copies of the module and of the data module (or None), and `loaders`; changes the
                copies, and returns the loaders to use.

        Raises:
            Exception: whatever failed in it, on this rank or another; all is as it was before.
        """

    def fits(self, callback: Any, steps: int, prepare: Callable[[Any, Any, Any], Any] | None = None) -> bool:
        """Do as `run`; False where memory lacked on any rank, or the data give no batch so large."""

    def searches(self, name: str) -> None:
        """Note that hyper-parameter ``name`` is set by a search.

        A run that differs in it alone is the same experiment for ``ckpt_path`` "auto", "last" and "best".
        """

    def say(self, text: str, *values: Any) -> None:
        """Say what was found, on rank 0."""


class SavedCheckpoints(Protocol):
    """What is to be known of the checkpoints that a callback has saved, such as `Checkpoint`."""

    dirpath: str | None
    """The folder or URL where they are; None until the run has chosen one."""

    @property
    def best_model_path(self) -> str:
        """The best that is kept; "" where there is none."""

    @property
    def best_model_score(self) -> float | None:
        """Its monitored value; None where nothing is monitored."""

    @property
    def current_score(self) -> float | None:
        """The newest checkpoint's monitored value; None where nothing is monitored."""

    @property
    def last_model_path(self) -> str:
        """The newest that is kept; "" where there is none."""


class ScheduledRate(Protocol):
    """A learning-rate scheduler and when it steps."""

    scheduler: Any
    """What ``step`` is called on."""

    interval: str
    """"epoch" or "step" (optimizer steps)."""

    name: str | None
    """What `LearningRateMonitor` calls it."""


class Records(Protocol):
    """Takes logged values."""

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
        """Take one value; see `TrainModule.log`."""


class ManualOptimization(Protocol):
    """Runs backward, and settles whose turn it is, where ``training_step`` steps itself."""

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss of shape ()."""

    def toggle(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients."""

    def untoggle(self, optimizer: Any) -> None:
        """Let require gradients again what did so before `toggle`."""
