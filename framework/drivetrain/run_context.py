"""RunContext: the properties and methods of a run that modules, data modules, callbacks and loggers can use."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from drivetrain._fit_arguments import FitArguments
from drivetrain._metrics import MetricStore
from drivetrain._run_state import (
    CheckpointsOfRun,
    ManualOptimization,
    RunState,
    SchedulerConfig,
    StopRequests,
    with_module_callbacks,
)
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain.checkpoint.save_request import SaveRequest
from drivetrain.environments import Placement, resolve_environment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import current_processes
from drivetrain.loggers import Logger
from drivetrain.precision import Precision, resolve_precision
from drivetrain.strategies.registry import strategy_by_name
from drivetrain.strategies.strategy import Strategy

# Needed for annotations only, and expensive to import.
if TYPE_CHECKING:
    from drivetrain._config.precedence import Settings
    from drivetrain._log_queue import LogQueue
    from drivetrain.profilers import Profiler


class RunContext(FitArguments):
    """A run, passed as ``trainer`` to the hooks of a `Callback`; modules and data modules read it as ``self.trainer``.

    The object is the `Fit`, and this class is the part of `Fit` that is useful within a run: what the run has and has
    counted so far, and what hooks can ask of it. Most arguments of `Fit` are attributes of the same name, and
    ``settings`` holds all of them. After a run, the attributes keep the values of its end.
    """

    run_state: RunState
    """The state of the current run, or of the last one. The engine writes it."""

    # Progress

    @property
    def current_epoch(self) -> int:
        """The number of completed epochs. After training, the last epoch counts even if the run ended within it."""
        progress = self.run_state.progress
        return progress.epoch + progress.cut_short

    @property
    def global_step(self) -> int:
        """The number of completed optimizer steps."""
        return self.run_state.progress.global_step

    @property
    def batch_idx(self) -> int:
        """The number of micro-batches of the current epoch that this rank has trained on."""
        return self.run_state.progress.batch_idx

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches that this rank has trained on."""
        return self.run_state.progress.micro_batches

    @property
    def samples_seen(self) -> int:
        """The number of samples that all ranks together have trained on."""
        return self.run_state.progress.samples_seen

    state: str
    """The state of the `Fit`: "idle", "fitting", "validating", "testing", "predicting", "finished" or "interrupted"."""

    @property
    def training(self) -> bool:
        """True in `Fit.fit`, except during validations."""
        return self._runs("fit") and not (self.run_state.validating or self.sanity_checking)

    @property
    def validating(self) -> bool:
        """True in `Fit.validate` and during the validations of `Fit.fit`, except in the sanity check."""
        if self._runs("fit"):
            return self.run_state.validating and not self.sanity_checking
        return self._runs("validate")

    @property
    def testing(self) -> bool:
        """True in `Fit.test`."""
        return self._runs("test")

    @property
    def predicting(self) -> bool:
        """True in `Fit.predict`."""
        return self._runs("predict")

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check, the short validation before training."""
        return self.run_state.sanity_checking

    @property
    def evaluating(self) -> bool:
        """True while the module is validated or tested, including the sanity check."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def is_last_batch(self) -> bool:
        """Whether the training micro-batch is the last one of its epoch; False if the epoch's length is unknown."""
        run, length = self.run_state, self.run_state.data.train_length
        if length is None:
            return False
        if run.current.loop == "training" and run.metrics.batch is not None:
            return run.current.batch_idx + 1 == length
        epoch_has_ended = run.progress.batch_idx == 0 and run.progress.epoch > 0  # the next epoch has not begun yet
        return epoch_has_ended or run.progress.batch_idx == length

    @property
    def interrupted(self) -> bool:
        """Whether an error, Ctrl-C or a preemption signal ended the last run early."""
        return self.state == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """Whether the run received SIGTERM, after which the run saves a checkpoint and exits."""
        stop = self.run_state.stop
        return stop is not None and signal.SIGTERM in (stop.signal, stop.preempted)

    @property
    def joining(self) -> bool:
        """True while this rank has no data left and only takes part in the collectives of the other ranks."""
        return self.run_state.metrics.joining

    @property
    def batch_indices(self) -> Sequence[Any] | None:
        """The data-set indices of the samples of the batch that this rank predicts, in the order of the batch.

        None outside prediction, and None if samples have no indices: in iterable data sets, in loaders that do not
        batch automatically or that override ``__iter__``, and in several combined loaders.
        """
        return self.run_state.current.indices

    @property
    def micro_batch_weight(self) -> float:
        """The number of items over which the loss of this rank's current training micro-batch is a mean.

        The weight is the result of `TrainModule.batch_weight` for the loader's batch, or by default the batch's number
        of samples. The weight is 0 on a joining rank. Manual optimization does not apply weights, and this property is
        then always the number of samples.
        """
        return self.run_state.current.weight

    # Data

    @property
    def num_training_batches(self) -> int | float:
        """The number of micro-batches of an epoch on each rank; infinite if neither limits nor loaders give it."""
        length = self.run_state.data.train_length
        return float("inf") if length is None else length

    @property
    def num_val_batches(self) -> list[int | float]:
        """The number of micro-batches of each validation loader."""
        return self._limits("validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        """The number of micro-batches of each test loader."""
        return self._limits("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """The number of micro-batches of each prediction loader."""
        return self._limits("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """The number of micro-batches of each validation loader in the sanity check."""
        if self.run_state.stage != "fit":
            return []
        steps = self.num_sanity_val_steps
        return [length if steps == -1 else min(steps, length) for length in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates: the module has a ``validation_step``, and ``limit_val_batches`` is not 0."""
        run = self.run_state
        return run.stage == "fit" and run.has_validation_step and self.limit_val_batches != 0

    @property
    def train_dataloader(self) -> Any:
        """The training loader(s) as passed; None in other stages."""
        loaders = self.run_state.data.loaders
        return loaders[0] if loaders else None

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader(s) as passed; None if there are none."""
        return self.run_state.data.given_to_evaluate.get("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader(s) as passed; None in other stages."""
        return self.run_state.data.given_to_evaluate.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader(s) as passed; None in other stages."""
        return self.run_state.data.given_to_evaluate.get("predict")

    @property
    def evaluated_loaders(self) -> Sequence[Any]:
        """The loaders that the current validation, test or prediction reads, as a flat sequence."""
        return self.run_state.data.evaluated

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """The arguments ``num_replicas`` and ``rank`` for your own `DistributedSampler`; None in a single process."""
        if self.world_size == 1:
            return None
        return {"num_replicas": self.strategy.data_world_size, "rank": self.strategy.data_rank}

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps of the whole run; infinite if neither limits nor the data bound it."""
        return self._running("estimated_stepping_batches").estimate_steps()

    # The module, the data module and the checkpoint that the run started from

    @property
    def lightning_module(self) -> Any:
        """The `TrainModule` of this run or the last one; None before the first."""
        return self.run_state.module

    module = lightning_module
    """Same as `lightning_module`."""

    model = lightning_module
    """Same as `lightning_module`: the module itself, not a wrapper such as `DistributedDataParallel`."""

    @property
    def datamodule(self) -> Any:
        """The `DataModule` of this run or the last one; None if no data module was passed."""
        return self.run_state.datamodule

    @property
    def ckpt_path(self) -> str | None:
        """The path of the checkpoint that the run started from ("last", "best" and "auto" are resolved), or None."""
        checkpoints = self.run_state.checkpoints
        return None if checkpoints is None or checkpoints.opened is None else checkpoints.opened.path

    # Devices and ranks

    @property
    def strategy(self) -> Strategy:
        """The strategy. Before a run with "auto", this is the strategy for the expected number of processes."""
        return self.run_state.strategy or self._strategy_before_a_run()

    @property
    def precision(self) -> Precision:
        """The precision in use."""
        return self.strategy.precision

    @property
    def world_size(self) -> int:
        """The number of processes."""
        if self.run_state.strategy is not None:
            return self.run_state.strategy.world_size
        if self.chosen_strategy is not None and self.chosen_strategy.single_process:
            return 1
        return max(self._expected_placement().world_size, self.num_devices * self.num_nodes)

    @property
    def global_rank(self) -> int:
        """The rank of this process. Before a run, this is the rank that the environment assigns."""
        return self._placement().rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self._placement().local_rank

    @property
    def node_rank(self) -> int:
        """The index of this node."""
        return self._placement().node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def num_devices(self) -> int:
        """The number of devices on this node, which is also the number of processes on this node."""
        strategy = self.run_state.strategy
        return max(len(self._indices()), 1) if strategy is None else strategy.placement.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices on this node; processes on the CPU count from 0."""
        indices = self._indices()
        return indices if len(indices) == self.num_devices else list(range(self.num_devices))

    @property
    def scaler(self) -> Any:
        """The precision's `GradScaler`; None if the precision does not scale the loss."""
        return getattr(self.precision, "scaler", None)

    @contextmanager
    def init_module(self) -> Iterator[None]:
        """Return a context in which modules are built in the run's dtype and, unless sharded, on the run's device.

        Layers that are too large to initialize here are built in ``configure_model``.
        """
        strategy = self.strategy
        on_device = nullcontext() if strategy.shards_parameters else strategy.device
        with strategy.precision.module_init_context(), on_device:
            yield

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors from all ranks; see `TrainModule.all_gather`. Collective."""
        return self._running("all_gather").all_gather(data, sync_grads)

    # Logging

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """All logged values, by every name under which they can be monitored."""
        return self.run_state.metrics.callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The latest values sent to the loggers."""
        return self.run_state.metrics.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest values logged with ``prog_bar=True``, as numbers. Reading this property waits for the device."""
        return {name: float(value) for name, value in self.progress_bar_values.items()}

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        """The values of `progress_bar_metrics` as tensors on their devices. Reading this property does not wait."""
        return self.run_state.metrics.progress_bar_metrics()

    loggers: list[Logger]
    """The loggers, to all of which values are sent."""

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None. Setting this property replaces all loggers by the given one."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    def log_metrics(self, values: Mapping[str, torch.Tensor | float], step: int | None = None) -> None:
        """Send values to all loggers, in the order of the calls. Does nothing on ranks other than 0.

        The call does not wait for tensors on a GPU. A row with such tensors, and all rows after this row, reach the
        loggers once the tensors are copied to the host: at the latest before a checkpoint is written and at the end of
        the run.

        Args:
            values: numbers and one-element tensors by name.
            step: the optimizer step of the values; by default ``global_step``.
        """
        if self.global_rank == 0 and self.loggers:
            from drivetrain._log_queue import LogQueue  # only runs that log need it

            self._log_queue = self._log_queue or LogQueue()
            row_step = self.global_step if step is None else step
            self._log_queue.put(
                self.loggers, {"epoch": self.current_epoch, **values}, row_step, takes_step=step is None
            )

    def finish_logging(self) -> None:
        """Wait for pending rows of `log_metrics` and pass them to the loggers. Does nothing on ranks other than 0."""
        if self._log_queue is not None and self._log_queue.rows:
            self._log_queue.deliver(wait=True)

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
        run = self._running("log_histogram")
        if self.loggers:
            run.check_collective("log_histogram")
            run.log_histograms(name, value, self.global_step if step is None else step, bins)

    def print(self, *args: Any, **options: Any) -> None:
        """Print on rank 0, on a separate line above the progress bar."""
        if self.global_rank != 0:
            return
        text = " ".join(map(str, args))
        if options or not any(each.write_line(text) for each in self.callbacks if isinstance(each, PrintsLines)):
            print(*args, **options)

    # Profiling

    @property
    def profiler(self) -> Profiler:
        """The profiler of the run; without a profiler, an object whose spans do nothing.

        ``with self.trainer.profiler.profile("augmentation"): ...`` adds a phase to the profiler's table and trace.
        """
        return _pass_through() if self.given_profiler is None else self.given_profiler

    # Callbacks, and requests to stop

    # The hooks of `Callback` are annotated with this class, so this module cannot import `Callback`.
    callbacks: list[Any]
    """The `Callback`s of all runs of this `Fit`, also the default ones. Others can be appended until set-up ends."""

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints, such as `Checkpoint`; None if there is none."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All callbacks that save checkpoints."""
        return self._callbacks_shown_as("checkpoint_callback")

    @property
    def early_stopping_callback(self) -> Any:
        """The first `EarlyStopping` callback; None if there is none."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All `EarlyStopping` callbacks."""
        return self._callbacks_shown_as("early_stopping_callback")

    @property
    def progress_bar_callback(self) -> Any:
        """The first `ProgressBar` callback; None if there is none."""
        return next(iter(self._callbacks_shown_as("progress_bar_callback")), None)

    def _callbacks_shown_as(self, attribute: str) -> list[Any]:
        """Return these callbacks of `Fit`, and of ``configure_callbacks`` in this run or the last one."""
        callbacks = with_module_callbacks(self.callbacks, self.run_state.module_callbacks)
        return [callback for callback in callbacks if callback.shown_as == attribute]

    @property
    def should_stop(self) -> bool:
        """Whether the run is to end early. If any rank sets this property, all ranks stop after the same step."""
        return self.run_state.stop is not None and self.run_state.stop.is_asked

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        reason = f"trainer.should_stop was set in {sys._getframe(1).f_code.co_qualname}" if value else None
        self._stop("should_stop").ask(reason)

    def request_stop(self, because: str) -> None:
        """Set `should_stop` with a reason, which is logged as the run ends.

        Args:
            because: the reason with its values, such as "val_loss is above 3".
        """
        self._stop("request_stop").ask(because)

    def stop_unless_withdrawn(self, owner: object, because: str | None) -> None:
        """Request a stop that is obeyed once ``min_steps`` and ``min_epochs`` are reached, or withdraw it.

        Call this method on all ranks at the same time, with the same decision.

        Args:
            owner: the callback that requests or withdraws.
            because: the reason with its values, such as "val_loss did not improve"; None withdraws the request.
        """
        self._stop("stop_unless_withdrawn").ask_or_withdraw(owner, because)

    def _stop(self, what: str) -> StopRequests:
        stop = self._running(what).stop
        assert stop is not None
        return stop

    # The run's folder

    @property
    def log_dir(self) -> str | None:
        """The folder of this run or the last one, as a path or URL equal on every rank; None if the run has no folder.

        The folder holds the loggers' files, ``checkpoints/``, ``logs/`` and ``run.json``; see docs/runs.md. An
        evaluation uses the folder of the last fit; without one, it has a folder if a logger writes files.
        """
        return self.run_state.folder.path

    @property
    def run_id(self) -> str:
        """The identifier of the run in `log_dir`, kept if the run is resumed in its folder; "" without a folder."""
        return self.run_state.folder.id

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
        self._running("save_checkpoint").check_collective("save_checkpoint")
        self._checkpoints("save_checkpoint").save(SaveRequest(os.fspath(path), weights_only, trainable_only))

    def save(self, request: SaveRequest | Callable[[], SaveRequest | None]) -> None:
        """Write a checkpoint at the next point from which the run can be resumed. Call this method on every rank.

        Within an epoch the point is reached when all hooks of the current event have run and the accumulation window is
        closed; elsewhere it is now. In ``on_exception`` the state before the step that failed is written, if the run
        has one process and `Checkpoint(save_on_exception=True)` keeps that state.

        Args:
            request: the checkpoint, or a function that returns it, or None to write nothing. A function is called when
                the point is reached and all hooks of the current event have run. Outside an epoch it waits for the
                next window of training that closes, so it is never called in a run that does not train.

        Raises:
            CheckpointError: the checkpoint could not be written. The error is raised on every rank.
        """
        self._checkpoints("save").save(request)

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        """Return the path and step of this run's newest complete checkpoint that is not after ``step``, or None.

        Waits for a checkpoint that is being written. Collective.
        """
        return self._checkpoints("checkpoint_before").newest_up_to(step)

    def roll_back(self, path: str) -> None:
        """Load a complete checkpoint of this run and continue training from it. Call this method on every rank.

        The checkpoint is loaded when all hooks of the current event have run and the accumulation window is closed.
        Later checkpoints of the run's `Checkpoint` callbacks are deleted.

        Raises:
            CheckpointError: the checkpoint cannot be opened.
        """
        self._checkpoints("roll_back").roll_back(path)

    def checkpoint_removed(self, identifier: str) -> None:
        """Record that a checkpoint was deleted. ``identifier`` is the identifier in the checkpoint's manifest."""
        self._running("checkpoint_removed").folder.notes.note_removal(identifier)

    # Optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        return self.run_state.optimization.optimizers

    @property
    def lr_schedulers(self) -> list[Any]:
        """The learning rate schedulers."""
        return [config.scheduler for config in self.lr_scheduler_configs]

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """Each learning rate scheduler, with the interval at which it steps."""
        return self.run_state.optimization.schedulers

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The total norm of gradients before the last clipping, of shape (); None if none were clipped yet."""
        return self.run_state.gradient_norm

    # Members that methods of `TrainModule` call

    @property
    def metrics(self) -> MetricStore:
        """The store to which `TrainModule.log` writes."""
        return self.run_state.metrics if self.run_state.stage else self._running("log").metrics

    @property
    def optimizer_handles(self) -> Sequence[Any]:
        """The handles that ``self.optimizers()`` returns in a module. Each handle has its optimizer's attributes."""
        return self._running("optimizers").optimization.handles

    def manual_step(self, what: str, does: str) -> ManualOptimization:
        """Return the training step of manual optimization.

        Args:
            what: the name of the calling method, for the error that is raised in automatic optimization.
            does: the action of the engine in automatic optimization, such as "runs backward on", for the same error.
        """
        manual = self._running(what).manual
        if manual is None:
            raise ConfigurationError(
                f"{what} was called in automatic optimization.",
                f"the engine itself {does} what training_step returns.",
                "set self.automatic_optimization = False in __init__, or return the loss.",
            )
        return manual

    def pass_over_training_data(self) -> None:
        """Call ``training_step`` on an epoch of the training data without training. Collective.

        The pass computes no gradients, calls no hooks, logs nothing and leaves the module in its mode. Its purpose is
        to update statistics, such as those of batch normalization after weights were replaced. Call this method from
        ``on_train_end``, because a pass within an epoch would move the position in the data.
        """
        self._running("pass_over_training_data").pass_over_data()

    def clip_gradients(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        """Clip the gradients of an optimizer; see `TrainModule.clip_gradients`."""
        run = self._running("clip_gradients")
        pairs = zip(run.optimization.handles, run.optimization.optimizers, strict=True)
        wrapped = next((wrapped for handle, wrapped in pairs if handle is optimizer), optimizer)
        run.gradient_norm = self.strategy.clip_gradients(wrapped, value, algorithm)

    # What `Fit` sets

    settings: Settings
    """Every argument of `Fit`, with the source of its value: code, environment, file or default."""

    default_root_dir: str
    """The folder for files."""

    searched: set[str]
    """Names of hyper-parameters that a finder, such as `LearningRateFinder`, sets."""

    built_unseeded: bool
    """Whether the module of a run with ``Fit(seed=)`` was built before the process was seeded."""

    # What the engine reads and hooks have no use for

    precision_setting: str | int | Precision
    """The argument ``precision`` of `Fit`."""

    chosen_strategy: Strategy | None
    """The strategy; None with strategy="auto" until the number of processes is known."""

    given_profiler: Profiler | None
    """The profiler of `Fit`; None without one."""

    _auto_strategy: Strategy | None = None
    """The strategy that "auto" was last resolved to."""

    _log_queue: LogQueue | None = None
    """The rows that are not delivered to the loggers yet; None if nothing was logged."""

    def resolved_strategy(self, world_size: int) -> Strategy:
        """Return the strategy for "auto" with ``world_size`` processes; the object of the last call if it fits."""
        name = "ddp" if world_size > 1 else "single_device"
        if self._auto_strategy is None or self._auto_strategy.name != name:
            self._auto_strategy = strategy_by_name(name)
        return self._auto_strategy

    def _strategy_before_a_run(self) -> Strategy:
        strategy = self.chosen_strategy or self.resolved_strategy(self.world_size)
        with suppress(ConfigurationError):  # the device is missing on this machine; starting the run raises this error
            strategy.device = resolve_devices(self.accelerator, self.devices).of(self.local_rank)
            strategy.precision = resolve_precision(self.precision_setting, strategy.device)
        return strategy

    def _placement(self) -> Strategy | Placement:
        chosen = self.chosen_strategy
        if chosen is not None and chosen.single_process:
            return chosen
        return self.run_state.strategy or self._expected_placement()

    def _expected_placement(self) -> Placement:
        """Return this process's expected placement before a run begins, for scripts that read the rank early.

        A process that was started to run the caller's script again has the rank that it was started for. Conflicting
        settings raise an error when the run begins, not in this function.
        """
        if self.num_nodes == 1 and self.devices in (1, "1") and current_processes() is not None:
            return Placement()  # each process of the script executes a separate run
        if dist.is_initialized():
            return Placement.on_one_node(dist.get_rank(), dist.get_world_size())
        environment = resolve_environment(self.environment)
        return environment.placement() if environment.started_processes else Placement()

    def _indices(self) -> list[int]:
        try:
            return list(resolve_devices(self.accelerator, self.devices).indices)
        except ConfigurationError:  # the device is missing on this machine; starting the run raises this error
            return []

    def _limits(self, stage: str) -> list[int | float]:
        lengths = self.run_state.data.evaluation_lengths.get(stage, [])
        return [float("inf") if length is None else length for length in lengths]

    def _runs(self, stage: str) -> bool:
        return self.run_state.stage == stage and self.state.endswith("ing")

    def _running(self, what: str) -> RunState:
        if not self.run_state.stage:
            raise ConfigurationError(
                f"{what} was used outside a run.",
                "it is available only while fit, validate, test or predict runs.",
                "use it from a step or a hook.",
            )
        return self.run_state

    def _checkpoints(self, what: str) -> CheckpointsOfRun:
        checkpoints = self._running(what).checkpoints
        assert checkpoints is not None
        return checkpoints

    def __getstate__(self) -> dict[str, Any]:
        # The run holds loops, data and connections of this process. A copy is like a `Fit` that has not run yet.
        return self.__dict__ | {"run_state": RunState(), "state": "idle", "_log_queue": None}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from drivetrain._config.foreign_names import TRAINER_ATTRIBUTES  # only an error needs it

            replacement = TRAINER_ATTRIBUTES.get(name.lstrip("_"))
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message if replacement is None else f"{message}: {replacement}.")


@cache
def _pass_through() -> Profiler:
    from drivetrain.profilers import PassThroughProfiler  # only runs with spans and no profiler need it

    return PassThroughProfiler()


@runtime_checkable
class PrintsLines(Protocol):
    """Draws on the terminal, and so prints what others print."""

    def write_line(self, text: str) -> bool:
        """Print ``text`` for ``trainer.print`` on rank 0.

        Returns:
            True if this callback has printed the text. If no callback has, ``trainer.print`` prints the text itself.
        """
