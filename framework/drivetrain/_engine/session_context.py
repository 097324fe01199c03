"""SessionContext: the base class of `Fit`, which implements `RunContext` by means of a `Session`.

`Fit` adds the arguments and the entry points. `Fit` and `SessionContext` are separate classes to avoid an import cycle:
`Fit` imports the modules that launch runs and trials, and these modules work on a `SessionContext`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain._engine.defaults import with_module_callbacks
from drivetrain._engine.session import Session
from drivetrain._engine.topology import expected_placement
from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.manual_step import ManualStep, OptimizerHandle
from drivetrain._loops.progress import Progress
from drivetrain._metrics import MetricStore
from drivetrain._runtime.accelerators import resolve_devices
from drivetrain.callback import Callback
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import Launcher
from drivetrain.loggers import Logger
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision, resolve_precision
from drivetrain.run_context import RunContext
from drivetrain.strategies.registry import strategy_by_name
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._engine.log_queue import LogQueue
    from drivetrain.callbacks import Checkpoint, EarlyStopping, ProgressBar
    from drivetrain.profilers import Profiler


class SessionContext(RunContext):
    """Implements `RunContext` with the state of the current session. After a run, the last session stays readable."""

    callbacks: list[Callback]

    launcher: str | Launcher
    """The argument ``launcher`` of `Fit`."""

    precision_setting: str | int | Precision
    """The argument ``precision`` of `Fit`."""

    chosen_strategy: Strategy | None
    """The strategy; None with strategy="auto" until the number of processes is known."""

    _auto_strategy: Strategy | None = None
    """The strategy that "auto" was last resolved to."""

    session: Session | None
    """The session of the current run, or of the last one; None before the first run."""

    given_profiler: Profiler | None
    """The profiler of `Fit`; None without one."""

    _log_queue: LogQueue | None
    """The rows that are not delivered to the loggers yet; None if nothing was logged."""

    @property
    def metrics(self) -> MetricStore:
        return self._running("log").core.metrics if self.session is None else self.session.core.metrics

    @property
    def progress(self) -> Progress:
        """The counters of epochs, micro-batches and steps."""
        return Progress() if self.session is None else self.session.core.progress

    @property
    def strategy(self) -> Strategy:
        if self.session is None:
            return self._strategy_before_a_run()
        assert self.chosen_strategy is not None
        return self.chosen_strategy

    def _strategy_before_a_run(self) -> Strategy:
        strategy = self.chosen_strategy or self.resolved_strategy(self.world_size)
        with suppress(ConfigurationError):  # the device is missing on this machine; starting the run raises this error
            strategy.device = resolve_devices(self.accelerator, self.devices).of(self.local_rank)
            strategy.precision = resolve_precision(self.precision_setting, strategy.device)
        return strategy

    def resolved_strategy(self, world_size: int) -> Strategy:
        """Return the strategy for "auto" with ``world_size`` processes; the object of the last call if it fits."""
        name = "ddp" if world_size > 1 else "single_device"
        if self._auto_strategy is None or self._auto_strategy.name != name:
            self._auto_strategy = strategy_by_name(name)
        return self._auto_strategy

    @property
    def precision(self) -> Precision:
        return self.strategy.precision

    @property
    def current_epoch(self) -> int:
        progress = self.progress
        return progress.epoch + progress.cut_short

    @property
    def global_step(self) -> int:
        return self.progress.global_step

    @property
    def batch_idx(self) -> int:
        return self.progress.batch_idx

    @property
    def micro_batches(self) -> int:
        return self.progress.micro_batches

    @property
    def samples_seen(self) -> int:
        return self.progress.samples_seen

    @property
    def batch_indices(self) -> Sequence[Any] | None:
        return None if self.session is None else self.session.core.position.indices

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.core.metrics.callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.core.metrics.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.progress_bar_values.items()}

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.core.metrics.progress_bar_metrics()

    @property
    def evaluation_so_far(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.core.metrics.evaluation_so_far()

    @property
    def should_stop(self) -> bool:
        return self.session is not None and self.session.stopping.stop.is_asked

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        reason = f"trainer.should_stop was set in {sys._getframe(1).f_code.co_qualname}" if value else None
        self._running("should_stop").stopping.stop.ask(reason)

    def request_stop(self, because: str) -> None:
        self._running("request_stop").stopping.stop.ask(because)

    def stop_unless_withdrawn(self, owner: object, because: str | None) -> None:
        self._running("stop_unless_withdrawn").stopping.stop.ask_or_withdraw(owner, because)

    @property
    def joining(self) -> bool:
        return self.session is not None and self.session.core.metrics.joining

    def _in_stage(self, stage: str) -> bool:
        return self.session is not None and self.session.core.request.stage == stage and self.state.endswith("ing")

    @property
    def training(self) -> bool:
        return self._in_stage("fit") and not self._evaluates_within_fit()

    @property
    def validating(self) -> bool:
        if self._in_stage("fit"):
            return self._evaluates_within_fit() and not self.sanity_checking
        return self._in_stage("validate")

    def _evaluates_within_fit(self) -> bool:
        assert self.session is not None
        evaluation = self.session.core.evaluation
        return evaluation.sanity_checking or evaluation.validating

    @property
    def testing(self) -> bool:
        return self._in_stage("test")

    @property
    def predicting(self) -> bool:
        return self._in_stage("predict")

    @property
    def sanity_checking(self) -> bool:
        return self.session is not None and self.session.core.evaluation.sanity_checking

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing or self.sanity_checking

    @property
    def is_last_batch(self) -> bool:
        session = self.session
        data = None if session is None else session.data.stage_data
        length = None if data is None else data.train_length
        if session is None or length is None:
            return False
        if session.core.position.loop == "training" and session.core.metrics.batch is not None:
            return session.core.position.batch_idx + 1 == length
        progress = session.core.progress
        epoch_has_ended = progress.batch_idx == 0 and progress.epoch > 0  # the next epoch has not begun yet
        return epoch_has_ended or progress.batch_idx == length

    @property
    def interrupted(self) -> bool:
        return self.state == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        return self.session is not None and signal.SIGTERM in (
            self.session.stopping.stop.signal,
            self.session.stopping.stop.preempted,
        )

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        return None if self.session is None else self.session.optimization.gradient_norm.value

    @property
    def world_size(self) -> int:
        if self.session is None:
            expected = expected_placement(self.environment, self.devices, self.num_nodes).world_size
            single = self.chosen_strategy is not None and self.chosen_strategy.single_process
            return 1 if single else max(expected, self.num_devices * self.num_nodes)
        assert self.chosen_strategy is not None
        return self.chosen_strategy.world_size

    @property
    def num_devices(self) -> int:
        if self.session is None or self.chosen_strategy is None:
            return max(len(self._indices()), 1)
        return self.chosen_strategy.placement.local_world_size

    @property
    def device_ids(self) -> list[int]:
        indices = self._indices()
        return indices if len(indices) == self.num_devices else list(range(self.num_devices))

    def _indices(self) -> list[int]:
        try:
            return list(resolve_devices(self.accelerator, self.devices).indices)
        except ConfigurationError:  # the device is missing on this machine; starting the run raises this error
            return []

    @property
    def scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        if empty_init:
            raise ConfigurationError(
                "init_module(empty_init=True).",
                "the parameters of a module built this way have no values until a checkpoint is loaded.",
                "build large layers in configure_model, which the strategy calls in the way that suits sharding.",
            )
        strategy = self.strategy
        on_device = nullcontext() if strategy.shards_parameters else strategy.device
        with strategy.precision.module_init_context(), on_device:
            yield

    @property
    def global_rank(self) -> int:
        return self._placement().rank

    @property
    def local_rank(self) -> int:
        return self._placement().local_rank

    @property
    def node_rank(self) -> int:
        return self._placement().node_rank

    def _placement(self) -> Strategy | Placement:
        if self.chosen_strategy is not None and (self.session is not None or self.chosen_strategy.single_process):
            return self.chosen_strategy
        return expected_placement(self.environment, self.devices, self.num_nodes)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def num_training_batches(self) -> int | float:
        data = None if self.session is None else self.session.data.stage_data
        length = None if data is None else data.train_length
        return float("inf") if length is None else length

    @property
    def num_val_batches(self) -> list[int | float]:
        return self._limits("validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        return self._limits("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self._limits("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        if self.session is None or self.session.core.request.stage != "fit":
            return []
        steps = self.num_sanity_val_steps
        return [length if steps == -1 else min(steps, length) for length in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        is_fit = self.session is not None and self.session.core.request.stage == "fit"
        return is_fit and self.limit_val_batches != 0 and is_overridden("validation_step", self.module, TrainModule)

    @property
    def train_dataloader(self) -> Any:
        data = None if self.session is None else self.session.data.stage_data
        return None if data is None or not data.loaders else data.loaders[0]

    @property
    def val_dataloaders(self) -> Any:
        return self._passed_loaders("validate")

    @property
    def test_dataloaders(self) -> Any:
        return self._passed_loaders("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._passed_loaders("predict")

    @property
    def evaluated_loaders(self) -> Sequence[Any]:
        data = None if self.session is None else self.session.data.stage_data
        return () if data is None else data.evaluated

    def _passed_loaders(self, stage: str) -> Any:
        data = None if self.session is None else self.session.data.stage_data
        return None if data is None else data.given_to_evaluate.get(stage)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        if self.world_size == 1:
            return None
        return {"num_replicas": self.strategy.data_world_size, "rank": self.strategy.data_rank}

    @property
    def lightning_module(self) -> Any:
        return None if self.session is None else self.session.core.request.module

    @property
    def module(self) -> Any:
        return self.lightning_module

    @property
    def model(self) -> Any:
        return self.lightning_module

    @property
    def datamodule(self) -> Any:
        return None if self.session is None else self.session.core.datamodule

    @property
    def ckpt_path(self) -> str | None:
        opened = None if self.session is None else self.session.checkpoints.opened
        return None if opened is None else opened.path

    def _limits(self, stage: str) -> list[int | float]:
        data = None if self.session is None else self.session.data.stage_data
        lengths = [] if data is None else data.lengths.get(stage, [])
        return [float("inf") if length is None else length for length in lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        return self._running("estimated_stepping_batches").estimated_steps

    @property
    def optimizers(self) -> list[Optimizer]:
        return [] if self.session is None else self.session.optimization.optimizers

    @property
    def optimizer_handles(self) -> list[OptimizerHandle]:
        return self._running("optimizers").optimization.handles

    def manual_step(self, what: str, does: str) -> ManualStep:
        training = self._running(what).training
        if training is None or training.manual is None:
            raise ConfigurationError(
                f"{what} was called in automatic optimization.",
                f"the engine itself {does} what training_step returns.",
                "set self.automatic_optimization = False in __init__, or return the loss.",
            )
        return training.manual

    @property
    def scheduler_configs(self) -> list[SchedulerConfig]:
        return [] if self.session is None else self.session.optimization.schedulers

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        return self.scheduler_configs

    @property
    def lr_schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.scheduler_configs]

    @property
    def logger(self) -> Logger | None:
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def profiler(self) -> Profiler:
        return _pass_through() if self.given_profiler is None else self.given_profiler

    @property
    def profiles(self) -> bool:
        return self.given_profiler is not None

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        return next(iter(self.checkpoint_callbacks), None)

    def _all_callbacks(self) -> list[Callback]:
        """Return the callbacks of `Fit` and those that ``configure_callbacks`` returned in this run or the last one."""
        return (
            self.callbacks
            if self.session is None
            else with_module_callbacks(self.callbacks, self.session.core.callbacks.from_module)
        )

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        from drivetrain.callbacks import Checkpoint  # importing it imports the code that writes checkpoints

        return [callback for callback in self._all_callbacks() if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        from drivetrain.callbacks import EarlyStopping  # only needed on use

        return [callback for callback in self._all_callbacks() if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        from drivetrain.callbacks import ProgressBar  # only needed on use

        return next((callback for callback in self._all_callbacks() if isinstance(callback, ProgressBar)), None)

    @property
    def micro_batch_weight(self) -> float:
        return 0.0 if self.session is None else self.session.core.position.weight

    @property
    def log_dir(self) -> str | None:
        return None if self.session is None else self.session.core.folder.path

    @property
    def run_id(self) -> str:
        return "" if self.session is None else self.session.core.folder.id

    def checkpoint_removed(self, identifier: str) -> None:
        self._running("checkpoint_removed").core.folder.notes.note_removal(identifier)

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        return self._running("checkpoint_before").checkpoints.newest_up_to(step)

    def roll_back(self, path: str) -> None:
        self._running("roll_back").checkpoints.roll_back(path)

    # Methods that hooks and users call

    def save_checkpoint(
        self, path: str | os.PathLike[str], weights_only: bool = False, trainable_only: bool = False
    ) -> None:
        session = self._running("save_checkpoint")
        session.collective_calls.check("save_checkpoint")
        session.checkpoints.save(os.fspath(path), weights_only, trainable_only)

    def defer_save(self, save: Callable[[], None]) -> None:
        self._running("defer_save").checkpoints.requests.ask(save)

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
        checkpoints = self._running("write_checkpoint").checkpoints
        checkpoints.write(path, weights_only, background, then, identifier, digest, trainable_only)

    def save_after_failure(
        self,
        path: str,
        digest: str | None = None,
        trainable_only: bool = False,
        then: Callable[[], None] = lambda: None,
        identifier: str = "",
    ) -> None:
        checkpoints = self._running("save_after_failure").checkpoints
        checkpoints.write_after_failure(path, digest, trainable_only, then, identifier)

    def log_metrics(self, values: Mapping[str, torch.Tensor | float], step: int | None = None) -> None:
        if self.global_rank == 0 and self.loggers:
            from drivetrain._engine.log_queue import LogQueue  # only runs that log need it

            self._log_queue = self._log_queue or LogQueue()
            row_step = self.global_step if step is None else step
            self._log_queue.put(
                self.loggers, {"epoch": self.current_epoch, **values}, row_step, takes_step=step is None
            )

    def log_histogram(self, name: str, value: Any, step: int | None = None, bins: int = 64) -> None:
        session = self._running("log_histogram")
        if self.loggers:
            from drivetrain._engine.histograms import log_histograms  # only runs that call this need it

            session.collective_calls.check("log_histogram")
            log_histograms(session.core, name, value, self.global_step if step is None else step, bins)

    def finish_logging(self) -> None:
        if self._log_queue is not None:
            self._log_queue.deliver(wait=True)

    def print(self, *args: Any, **options: Any) -> None:
        if self.global_rank != 0:
            return
        text = " ".join(map(str, args))
        if options or not any(callback.write_line(text) for callback in self.callbacks):
            print(*args, **options)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        return self._running("all_gather").collective_calls.all_gather(data, sync_grads)

    def pass_over_training_data(self) -> None:
        training = self._running("pass_over_training_data").training
        assert training is not None
        training.pass_over_data()

    def manual_backward(self, loss: torch.Tensor) -> None:
        self.manual_step("manual_backward", "runs backward on").backward(loss)

    def clip_gradients(self, optimizer: Any, value: float, algorithm: str = "norm") -> None:
        session = self._running("clip_gradients")
        wrapped = optimizer.optimizer if isinstance(optimizer, OptimizerHandle) else optimizer
        session.optimization.gradient_norm.value = self.strategy.clip_gradients(wrapped, value, algorithm)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from drivetrain._config.lightning_names import trainer_attribute_error  # only an error needs it

            raise AttributeError(trainer_attribute_error(type(self).__name__, name))

    def _running(self, what: str) -> Session:
        if self.session is None:
            raise ConfigurationError(
                f"{what} was used outside a run.",
                "it is available only while fit, validate, test or predict runs.",
                "use it from a step or a hook.",
            )
        return self.session


@cache
def _pass_through() -> Profiler:
    from drivetrain.profilers import PassThroughProfiler  # only runs with spans and no profiler need it

    return PassThroughProfiler()
