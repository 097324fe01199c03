"""What modules, callbacks and users read of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from drivetrain._engine.session import Session
from drivetrain._engine.topology import expected_placement
from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain._loops.manual_step import ManualStep, OptimizerHandle
from drivetrain._loops.progress import Progress
from drivetrain.callback import Callback
from drivetrain.environments import Environment, Placement
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import Logger
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.callbacks import Checkpoint


class RunReads:
    """The reads of `Fit`, over the run that is under way or was the last one."""

    callbacks: list[Callback]
    """Those of every run, the default ones included."""

    loggers: list[Logger]
    """Where numbers go."""

    environment: str | Environment
    """Who started this process."""

    devices: int | str | list[int]
    """Of each node, as they were asked for."""

    num_nodes: int
    """Over how many nodes."""

    state: str
    """"idle", "fitting", "validating", "testing", "predicting", "finished" or "interrupted"."""

    chosen_strategy: Strategy | None
    """The strategy; None while strategy="auto" waits for the number of processes."""

    session: Session | None
    """The run that is under way, or the last one."""

    @property
    def metrics(self) -> Any:
        """Where `TrainModule.log` writes."""
        return self._running("log").metrics if self.session is None else self.session.metrics

    @property
    def progress(self) -> Progress:
        """The counters."""
        return Progress() if self.session is None else self.session.progress

    @property
    def strategy(self) -> Strategy:
        """The strategy; with "auto" known once a run has begun."""
        if self.chosen_strategy is None:
            raise ConfigurationError(
                "strategy='auto' is not resolved yet.",
                "it depends on the number of processes, which is known once a run begins.",
                "read it in or after fit, or name a strategy.",
            )
        return self.chosen_strategy

    @property
    def precision(self) -> Precision:
        """The precision in use."""
        return self.strategy.precision

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps made."""
        return self.progress.global_step

    @property
    def micro_batches(self) -> int:
        """Micro-batches trained on by this rank."""
        return self.progress.micro_batches

    @property
    def samples_seen(self) -> int:
        """Samples trained on by all ranks together."""
        return self.progress.samples_seen

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Everything logged, by every name it is known by."""
        return {} if self.session is None else self.session.metrics.callback_metrics()

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The latest values that went to the loggers."""
        return {} if self.session is None else self.session.metrics.logged_metrics()

    @property
    def progress_bar_metrics(self) -> dict[str, torch.Tensor]:
        """The latest values logged with ``prog_bar=True``."""
        return {} if self.session is None else self.session.metrics.progress_bar_metrics()

    @property
    def should_stop(self) -> bool:
        """Set it, on any rank, to end the run early; all ranks then stop after the same step."""
        return self.session is not None and self.session.stop.requested

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        stop = self._running("should_stop").stop
        if value:
            stop.ask(f"trainer.should_stop was set in {sys._getframe(1).f_code.co_qualname}")
        else:
            stop.requested, stop.because = False, None

    def ask_to_stop(self, because: str) -> None:
        """Set `should_stop`, and say why: the run ends with a line that tells it.

        Args:
            because: the reason, with its numbers: "val_loss is above 3".
        """
        self._running("ask_to_stop").stop.ask(because)

    @property
    def joining(self) -> bool:
        """True while this rank has no data and only keeps the others company."""
        return self.session is not None and self.session.metrics.joining

    @property
    def sanity_checking(self) -> bool:
        """True during the validation that is tried before training."""
        return self.session is not None and self.session.sanity_checking

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The total norm before the last clipping, of shape (); None where nothing was clipped."""
        return None if self.session is None else self.session.gradient_norm

    @property
    def world_size(self) -> int:
        """How many processes run together."""
        return 1 if self.chosen_strategy is None else self.chosen_strategy.world_size

    @property
    def global_rank(self) -> int:
        """This process among all; before a run, as far as those who started it have said."""
        return self._standing().rank

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self._standing().local_rank

    @property
    def node_rank(self) -> int:
        """This node among all."""
        return self._standing().node_rank

    def _standing(self) -> Strategy | Placement:
        if self.chosen_strategy is not None and (self.session is not None or self.chosen_strategy.single_process):
            return self.chosen_strategy
        return expected_placement(self.environment, self.devices, self.num_nodes)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on each rank, by limits and ``len(loader)``; infinite where neither says."""
        data = None if self.session is None else self.session.data
        length = None if data is None else data.train_length
        return float("inf") if length is None else length

    @property
    def num_val_batches(self) -> list[int | float]:
        """Micro-batches of each validation loader."""
        return self._limits("validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Micro-batches of each test loader."""
        return self._limits("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Micro-batches of each prediction loader."""
        return self._limits("predict")

    def _limits(self, stage: str) -> list[int | float]:
        data = None if self.session is None else self.session.data
        lengths = [] if data is None else data.lengths.get(stage, [])
        return [float("inf") if length is None else length for length in lengths]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run; infinite where nothing bounds it."""
        return self._running("estimated_stepping_batches").estimated_steps

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        return [] if self.session is None else self.session.optimizers

    @property
    def optimizer_handles(self) -> list[OptimizerHandle]:
        """What ``self.optimizers()`` gives in a module."""
        return self._running("optimizers").handles

    def manual_step(self, what: str, does: str) -> ManualStep:
        """What runs manual optimization; refuses ``what`` elsewhere, where the engine ``does`` it."""
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
        """The schedulers and when they step."""
        return [] if self.session is None else self.session.schedulers

    @property
    def lr_schedulers(self) -> list[Any]:
        """The schedulers."""
        return [config.scheduler for config in self.scheduler_configs]

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first callback that saves checkpoints."""
        from drivetrain.callbacks import Checkpoint  # with all that writes checkpoints

        return next((callback for callback in self.callbacks if isinstance(callback, Checkpoint)), None)

    def checkpoint_before(self, step: int) -> tuple[str, int] | None:
        """Return the newest whole checkpoint of this run without any optimizer step after ``step``, and its own step.

        Waits for one that is being written. Collective.
        """
        return self._running("checkpoint_before").checkpoints.before(step)

    def roll_back(self, path: str) -> None:
        """Go back to a checkpoint of this run, a whole one, and train on from there; ask on every rank alike.

        That is once all hooks of the event are through and the accumulation window is closed. What the run's
        `Checkpoint` callbacks wrote since goes.

        Raises:
            CheckpointError: it cannot be opened.
        """
        self._running("roll_back").checkpoints.roll_back(path)

    def _running(self, what: str) -> Session:
        if self.session is None:
            raise ConfigurationError(
                f"{what} was used outside a run.",
                "it exists only while fit, validate, test or predict runs.",
                "use it from a step or a hook.",
            )
        return self.session
