"""What modules, callbacks and users read of a run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain._engine.defaults import with_own
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
    from drivetrain.callbacks import Checkpoint, EarlyStopping, ProgressBar
    from drivetrain.profilers import Profiler


class RunState(RunContext):
    """The reads of `Fit`, over the run that is under way or was the last one; `RunContext` says what each is."""

    callbacks: list[Callback]

    launcher: str | Launcher
    """How processes start."""

    precision_setting: str | int | Precision
    """The precision as it was asked for."""

    chosen_strategy: Strategy | None
    """The strategy; None while strategy="auto" waits for the number of processes."""

    _foreseen: Strategy | None = None
    """What strategy="auto" was taken for, before it was known."""

    session: Session | None
    """The run that is under way, or the last one."""

    given_profiler: Profiler | None
    """What measures runs; None where nothing does."""

    @property
    def metrics(self) -> MetricStore:
        return self._running("log").metrics if self.session is None else self.session.metrics

    @property
    def progress(self) -> Progress:
        """The counters."""
        return Progress() if self.session is None else self.session.progress

    @property
    def strategy(self) -> Strategy:
        if self.session is None:
            return self._strategy_before_a_run()
        assert self.chosen_strategy is not None
        return self.chosen_strategy

    def _strategy_before_a_run(self) -> Strategy:
        strategy = self.chosen_strategy or self.resolved_strategy(self.world_size)
        with suppress(ConfigurationError):  # no such device here: the run will say so
            strategy.device = resolve_devices(self.accelerator, self.devices).of(self.local_rank)
            strategy.precision = resolve_precision(self.precision_setting, strategy.device)
        return strategy

    def resolved_strategy(self, world_size: int) -> Strategy:
        """What ``strategy="auto"`` is on so many processes, always the same object for as many."""
        name = "ddp" if world_size > 1 else "single_device"
        if self._foreseen is None or self._foreseen.name != name:
            self._foreseen = strategy_by_name(name)
        return self._foreseen

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
        return None if self.session is None else self.session.position.indices

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.metrics.callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.metrics.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.progress_bar_values.items()}

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.metrics.progress_bar_metrics()

    @property
    def evaluation_so_far(self) -> dict[str, torch.Tensor]:
        return {} if self.session is None else self.session.metrics.evaluation_so_far()

    @property
    def should_stop(self) -> bool:
        return self.session is not None and self.session.stop.requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        stop = self._running("should_stop").stop
        if value:
            stop.ask(f"trainer.should_stop was set in {sys._getframe(1).f_code.co_qualname}")
        else:
            stop.requested, stop.because = False, None

    def ask_to_stop(self, because: str) -> None:
        self._running("ask_to_stop").stop.ask(because)

    @property
    def joining(self) -> bool:
        return self.session is not None and self.session.metrics.joining

    def _in_stage(self, stage: str) -> bool:
        return self.session is not None and self.session.stage == stage and self.state.endswith("ing")

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
        return self.session.sanity_checking or self.session.validating

    @property
    def testing(self) -> bool:
        return self._in_stage("test")

    @property
    def predicting(self) -> bool:
        return self._in_stage("predict")

    @property
    def sanity_checking(self) -> bool:
        return self.session is not None and self.session.sanity_checking

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing or self.sanity_checking

    @property
    def is_last_batch(self) -> bool:
        session = self.session
        length = None if session is None or session.data is None else session.data.train_length
        if session is None or length is None:
            return False
        if session.position.loop == "training" and session.metrics.batch is not None:
            return session.position.batch_idx + 1 == length
        progress = session.progress
        ended = progress.batch_idx == 0 and progress.epoch > 0  # nothing of the next epoch was read yet
        return ended or progress.batch_idx == length

    @property
    def interrupted(self) -> bool:
        return self.state == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        return self.session is not None and signal.SIGTERM in (self.session.stop.signal, self.session.stop.leaving)

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        return None if self.session is None else self.session.gradient_norm

    @property
    def world_size(self) -> int:
        if self.session is None:
            expected = expected_placement(self.environment, self.devices, self.num_nodes).world_size
            alone = self.chosen_strategy is not None and self.chosen_strategy.single_process
            return 1 if alone else max(expected, self.num_devices * self.num_nodes)
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
        except ConfigurationError:  # no such device here: the run will say so
            return []

    @property
    def scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        if empty_init:
            raise ConfigurationError(
                "init_module(empty_init=True).",
                "what is built so has no values until a checkpoint is loaded.",
                "build large layers in configure_model, which strategies call where they hold parts of them.",
            )
        strategy = self.strategy
        place = nullcontext() if strategy.shards_parameters else strategy.device
        with strategy.precision.module_init_context(), place:
            yield

    @property
    def global_rank(self) -> int:
        return self._standing().rank

    @property
    def local_rank(self) -> int:
        return self._standing().local_rank

    @property
    def node_rank(self) -> int:
        return self._standing().node_rank

    def _standing(self) -> Strategy | Placement:
        if self.chosen_strategy is not None and (self.session is not None or self.chosen_strategy.single_process):
            return self.chosen_strategy
        return expected_placement(self.environment, self.devices, self.num_nodes)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def num_training_batches(self) -> int | float:
        data = None if self.session is None else self.session.data
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
        if self.session is None or self.session.stage != "fit":
            return []
        steps = self.num_sanity_val_steps
        return [length if steps == -1 else min(steps, length) for length in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        fits = self.session is not None and self.session.stage == "fit"
        return fits and self.limit_val_batches != 0 and is_overridden("validation_step", self.module, TrainModule)

    @property
    def train_dataloader(self) -> Any:
        data = None if self.session is None else self.session.data
        return None if data is None or not data.loaders else data.loaders[0]

    @property
    def val_dataloaders(self) -> Any:
        return self._given_to("validate")

    @property
    def test_dataloaders(self) -> Any:
        return self._given_to("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self._given_to("predict")

    @property
    def evaluated_loaders(self) -> Sequence[Any]:
        data = None if self.session is None else self.session.data
        return () if data is None else data.evaluated

    def _given_to(self, stage: str) -> Any:
        data = None if self.session is None else self.session.data
        return None if data is None else data.given_to_evaluate.get(stage)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        if self.world_size == 1:
            return None
        return {"num_replicas": self.strategy.data_world_size, "rank": self.strategy.data_rank}

    @property
    def lightning_module(self) -> Any:
        return None if self.session is None else self.session.module

    @property
    def module(self) -> Any:
        return self.lightning_module

    @property
    def model(self) -> Any:
        return self.lightning_module

    @property
    def datamodule(self) -> Any:
        return None if self.session is None else self.session.given.datamodule

    @property
    def ckpt_path(self) -> str | None:
        opened = None if self.session is None else self.session.checkpoints.opened
        return None if opened is None else opened.path

    def _limits(self, stage: str) -> list[int | float]:
        data = None if self.session is None else self.session.data
        lengths = [] if data is None else data.lengths.get(stage, [])
        return [float("inf") if length is None else length for length in lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        return self._running("estimated_stepping_batches").estimated_steps

    @property
    def optimizers(self) -> list[Optimizer]:
        return [] if self.session is None else self.session.optimizers

    @property
    def optimizer_handles(self) -> list[OptimizerHandle]:
        return self._running("optimizers").handles

    def manual_step(self, what: str, does: str) -> ManualStep:
        manual = self._running(what).manual
        if manual is None:
            raise ConfigurationError(
                f"{what} was called in automatic optimization.",
                f"the engine {does} what training_step returns.",
                "set self.automatic_optimization = False in __init__, or return the loss.",
            )
        return manual

    @property
    def scheduler_configs(self) -> list[SchedulerConfig]:
        return [] if self.session is None else self.session.schedulers

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
        """With those of the module's ``configure_callbacks`` in this run, or the last one."""
        return self.callbacks if self.session is None else with_own(self.callbacks, self.session.own)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        from drivetrain.callbacks import Checkpoint  # with all that writes checkpoints

        return [callback for callback in self._all_callbacks() if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        from drivetrain.callbacks import EarlyStopping  # by whoever stops early

        return [callback for callback in self._all_callbacks() if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        from drivetrain.callbacks import ProgressBar  # by whoever looks on

        return next((callback for callback in self._all_callbacks() if isinstance(callback, ProgressBar)), None)

    @property
    def micro_batch_weight(self) -> float:
        return 0.0 if self.session is None else self.session.position.weight

    @property
    def log_dir(self) -> str | None:
        return None if self.session is None else self.session.folder.path

    @property
    def run_id(self) -> str:
        return "" if self.session is None else self.session.folder.id

    def checkpoint_removed(self, identifier: str) -> None:
        self._running("checkpoint_removed").folder.removed(identifier)

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        return self._running("checkpoint_before").checkpoints.before(step)

    def roll_back(self, path: str) -> None:
        self._running("roll_back").checkpoints.roll_back(path)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from drivetrain._config.lightning_names import (
                trainer_attribute_error,
            )  # by whoever asks for what is not there

            raise AttributeError(trainer_attribute_error(type(self).__name__, name))

    def _running(self, what: str) -> Session:
        if self.session is None:
            raise ConfigurationError(
                f"{what} was used outside a run.",
                "it exists only while fit, validate, test or predict runs.",
                "use it from a step or a hook.",
            )
        return self.session


@cache
def _pass_through() -> Profiler:
    from drivetrain.profilers import PassThroughProfiler  # by spans in a run that nobody profiles

    return PassThroughProfiler()
