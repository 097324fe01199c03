"""What modules, callbacks and users read of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain._engine.session import Session
from drivetrain._engine.topology import expected_placement
from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain._loops.manual_step import ManualStep, OptimizerHandle
from drivetrain._loops.progress import Progress
from drivetrain._metrics import MetricStore
from drivetrain.callback import Callback
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import Launcher
from drivetrain.loggers import Logger
from drivetrain.precision import Precision
from drivetrain.run_context import RunContext
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.callbacks import Checkpoint
    from drivetrain.profilers import Profiler


class RunReads(RunContext):
    """The reads of `Fit`, over the run that is under way or was the last one; `RunContext` says what each is."""

    callbacks: list[Callback]

    launcher: str | Launcher
    """How processes start."""

    precision_setting: str | int | Precision
    """The precision as it was asked for."""

    chosen_strategy: Strategy | None
    """The strategy; None while strategy="auto" waits for the number of processes."""

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
        if self.chosen_strategy is None:
            raise ConfigurationError(
                "strategy='auto' is not resolved yet.",
                "it depends on the number of processes, which is known once a run begins.",
                "read it in or after fit, or name a strategy.",
            )
        return self.chosen_strategy

    @property
    def precision(self) -> Precision:
        return self.strategy.precision

    @property
    def current_epoch(self) -> int:
        return self.progress.epoch

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
    def progress_bar_metrics(self) -> dict[str, torch.Tensor]:
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

    @property
    def sanity_checking(self) -> bool:
        return self.session is not None and self.session.sanity_checking

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        return None if self.session is None else self.session.gradient_norm

    @property
    def world_size(self) -> int:
        return 1 if self.chosen_strategy is None else self.chosen_strategy.world_size

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
    def predict_dataloaders(self) -> Sequence[Any]:
        data = None if self.session is None else self.session.data
        return () if data is None or "predict" not in data.sources else data.evaluated

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
    def lr_schedulers(self) -> list[Any]:
        return [config.scheduler for config in self.scheduler_configs]

    @property
    def logger(self) -> Logger | None:
        return self.loggers[0] if self.loggers else None

    @property
    def profiler(self) -> Profiler:
        if self.given_profiler is None:
            from drivetrain.profilers import PassThroughProfiler  # by spans in a run that nobody profiles

            return PassThroughProfiler()
        return self.given_profiler

    @property
    def profiles(self) -> bool:
        return self.given_profiler is not None

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        from drivetrain.callbacks import Checkpoint  # with all that writes checkpoints

        return next((callback for callback in self.callbacks if isinstance(callback, Checkpoint)), None)

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

    def _running(self, what: str) -> Session:
        if self.session is None:
            raise ConfigurationError(
                f"{what} was used outside a run.",
                "it exists only while fit, validate, test or predict runs.",
                "use it from a step or a hook.",
            )
        return self.session
