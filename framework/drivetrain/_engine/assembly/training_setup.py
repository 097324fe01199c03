"""Builds the training loop from the settings, so that steps do not check which features are enabled."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from drivetrain._config.argument_checks import parse_duration
from drivetrain._engine.assembly.evaluation_setup import build_validation
from drivetrain._engine.assembly.monitors import warn_of_unlogged_monitors
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._loops.epoch_reader import EpochReader
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.loss_checks import EpochChecks, refusing_anomalies
from drivetrain._loops.manual_step import ManualStep
from drivetrain._loops.schedulers import Schedulers
from drivetrain._loops.step import AutomaticStep, TrainStep
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.train import TrainLoop
from drivetrain._loops.validation import ValidationPlan
from drivetrain._loops.window_snapshot import WindowSnapshot
from drivetrain.callback import SavesOnException, SchedulesWindows
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")


def build_training(run: RunCore) -> None:
    """Build the training loop of a run, once it has its optimizers."""
    data, checkpoints = run.data, run.checkpoints
    assert checkpoints is not None
    _prepare_stopping(run)
    validate = build_validation(run) if data.validates else None
    trainer, metrics, strategy = run.trainer, run.metrics, run.strategy
    step = _build_step(run)
    if trainer.detect_anomaly:
        step.forward_backward = refusing_anomalies(step.forward_backward, run.progress, strategy.rank)
        step.run_weightless = refusing_anomalies(step.run_weightless, run.progress, strategy.rank)
    if strategy.rank == 0:
        strategy.precision.on_minimum_scale = partial(_warn_of_loss_scale, strategy.precision)
    if validate is not None:
        _warn_if_never_validates(run)
    run.loop = TrainLoop(
        step=step,
        reader=_build_reader(run),
        hooks=run.callbacks.hooks,
        progress=run.progress,
        current=run.current,
        stop=run.stop,
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        log=run.loop_log(),
        checkpoints=checkpoints,
        snapshot=run.snapshot,
        schedulers=_build_schedulers(run),
        validation=ValidationPlan(
            validate,
            trainer.val_check_interval,
            trainer.check_val_every_n_epoch,
            data.train_length,
            run.progress,
            run.stop,
            metrics,
            reloads=data.reload is not None,
        ),
        checks=EpochChecks(step, run.progress, strategy.rank == 0, partial(warn_of_unlogged_monitors, run)),
        reload=data.reload,
        apply_trainable_changes=partial(_apply_trainable_changes, run),
        resize=partial(data.resize_training, run.progress),
    )
    run.manual = step if isinstance(step, ManualStep) else None
    run.pass_over_data = partial(_pass_over_data, run)


def _apply_trainable_changes(run: RunCore) -> None:
    """Check the changes that hooks have made since the last epoch. Called at the beginning of each epoch."""
    run.callbacks.refuse_appended()
    assert run.trainables is not None
    run.trainables.adapt_strategy()


def _warn_if_never_validates(run: RunCore) -> None:
    """Warn if the run has fewer epochs than an interval between validations. A later run may have more epochs."""
    every, epochs = run.trainer.check_val_every_n_epoch, run.trainer.max_epochs
    if run.strategy.rank == 0 and every is not None and epochs is not None and 0 < epochs < every:
        logger.warning(
            "check_val_every_n_epoch=%d is more than max_epochs=%d: this run never validates. Lower "
            "check_val_every_n_epoch, or pass no validation data.",
            every,
            epochs,
        )


def _build_reader(run: RunCore) -> EpochReader:
    module, data, trainer = run.module, run.data, run.trainer
    is_weighed = module.automatic_optimization and is_overridden("batch_weight", module, TrainModule)
    return EpochReader(
        data.training,
        lambda: trainer.accumulate_grad_batches,
        bool(trainer.overfit_batches),
        run.strategy,
        module.batch_weight if is_weighed else None,
        run.move,
        progress=run.progress,
        rng_replay=data.rng_replay,
        lengths=data.lengths,
        origin_of=data.epoch_position.origin,
    )


def _pass_over_data(run: RunCore) -> None:
    """Run the training step over an epoch's data without training."""
    from drivetrain._loops.evaluate import pass_over_training_data  # only some callbacks need it

    pass_over_training_data(run.data.training, run.module, run.runner, run.strategy, run.metrics, run.move)


def _prepare_stopping(run: RunCore) -> None:
    """Build the request that ends training early, and the snapshot with which a run can end within a window."""
    trainer = run.trainer
    max_time = None if trainer.max_time is None else parse_duration("max_time", trainer.max_time)
    run.stop = StopRequest(run.strategy.control, max_time, trainer.min_steps, trainer.min_epochs)
    # After a failure, only a run of one process can save.
    every_step = run.strategy.world_size == 1 and any(
        isinstance(callback, SavesOnException) and callback.save_on_exception for callback in run.callbacks
    )
    if every_step or (run.saves_on_signals and run.module.automatic_optimization):
        run.snapshot = WindowSnapshot(run.module, run.data.rng_replay, run.metrics, run.progress, every_step)


def estimated_steps(run: RunCore) -> int | float:
    """Return the number of optimizer steps of the whole run, from limits and the data; infinite without a bound."""
    return _count_steps(run, *run.data.counted_from)


def read_estimate(run: RunCore) -> int | float:
    """Return `estimated_steps` for user code, whose schedules may then depend on it.

    In `setup` of a fit, when no loaders exist yet, this function builds the training loader. It is then collective.
    """
    run.data.estimate_was_read = True
    if run.data.trains or run.stage != "fit":
        return estimated_steps(run)
    return _count_steps(run, run.data.length_before_loading())


def _count_steps(run: RunCore, length: int | None, epoch: int = 0, done: int = 0) -> int | float:
    """Return the number of steps of a run whose epochs from ``epoch`` on have ``length`` micro-batches each.

    Args:
        run: the run.
        length: the number of micro-batches of an epoch; None if it is unknown.
        epoch: the first epoch that has this length.
        done: the number of steps that were made before this epoch.
    """
    trainer = run.trainer
    if length is None or trainer.max_epochs in (None, -1):
        return math.inf if trainer.max_steps == -1 else trainer.max_steps
    schedule = next((callback for callback in run.callbacks if isinstance(callback, SchedulesWindows)), None)
    if schedule is None:
        steps = done + math.ceil(length / trainer.accumulate_grad_batches) * (trainer.max_epochs - epoch)
    else:
        windows = (schedule.micro_batches_per_window(number) for number in range(epoch, trainer.max_epochs))
        steps = done + sum(math.ceil(length / window) for window in windows)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def _warn_of_loss_scale(precision: Precision, scale: float) -> None:
    """Warn, once, that the loss scale has reached its minimum."""
    precision.on_minimum_scale = None
    logger.warning(
        "The loss scale has fallen to its floor, 2^%d: gradients in fp16 were not finite even with a small "
        "scaled loss, and each such step was skipped. Check whether the loss itself is NaN "
        "(detect_anomaly=True, NonFiniteGuard), or train in 'bf16-mixed'. This is logged once.",
        round(math.log2(scale)),
    )


def _build_schedulers(run: RunCore) -> Schedulers:
    data, module = run.data, run.module
    override = module.lr_scheduler_step if is_overridden("lr_scheduler_step", module, TrainModule) else None
    return Schedulers(
        run.optimization.schedulers if module.automatic_optimization else [],
        override,
        run.metrics,
        estimated_steps=estimated_steps(run),
        estimated_length=None if data.reload else data.train_length,
        estimate_was_read=data.estimate_was_read,
        warns=run.strategy.rank == 0,
    )


def _build_step(run: RunCore) -> TrainStep:
    data, optimization, trainables = run.data, run.optimization, run.trainables
    assert trainables is not None
    module, strategy = run.module, run.strategy
    parts = module, run.runner, strategy, run.callbacks.hooks, run.metrics, trainables
    if not module.automatic_optimization:
        _check_manual(run)
        return ManualStep(*parts, optimization.handles)
    automatic_parts = *parts, optimization, run.progress, _build_clipping(run), _unscales_first(run)
    if not optimization.closure:
        return AutomaticStep(*automatic_parts)
    if strategy.precision.scales_loss:
        raise ConfigurationError(
            f"precision={strategy.precision.name!r} with {type(optimization.optimizers[0]).__name__}.",
            "the optimizer evaluates the loss several times a step, and each evaluation may overflow by itself.",
            "use precision='bf16-mixed' or '32-true'.",
        )
    from drivetrain._loops.closure_step import ClosureStep  # only closure optimizers need it

    return ClosureStep(*automatic_parts, keeps_batches=data.train.fresh_memory and data.reload is None)


def _check_manual(run: RunCore) -> None:
    trainer = run.trainer
    for name, off in (("accumulate_grad_batches", (1,)), ("gradient_clip_val", (None, 0))):
        if (value := getattr(trainer, name)) not in off:
            raise ConfigurationError(
                f"{name}={value} with manual optimization.",
                "training_step itself runs backward, clips gradients and steps the optimizers.",
                f"leave out {name}; in training_step, step after several batches, or call self.clip_gradients.",
            )


def _build_clipping(run: RunCore) -> Callable[[Sequence[Optimizer]], Any] | None:
    """Return the function that clips gradients; None without clipping."""
    trainer, module, strategy = run.trainer, run.module, run.strategy
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if is_overridden("configure_gradient_clipping", module, TrainModule):

        def overridden(optimizers: Sequence[Optimizer]) -> None:
            for optimizer in optimizers:
                module.configure_gradient_clipping(
                    optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
                )

        return overridden
    if algorithm == "value" and value is None and not is_overridden("clip_gradients", strategy, Strategy):
        raise ConfigurationError(
            "gradient_clip_algorithm='value' without gradient_clip_val.",
            "without a limit, gradients are not clipped.",
            "also set gradient_clip_val, or leave out gradient_clip_algorithm.",
        )
    if not value:
        return None

    def clip(optimizers: Sequence[Optimizer]) -> None:
        run.gradient_norm = strategy.clip_gradients(optimizers, value, algorithm)

    return clip


def _unscales_first(run: RunCore) -> bool:
    """Return whether gradients with a loss scale are unscaled in a separate pass, rather than while they are clipped.

    A separate pass is needed if gradients are not clipped, or if a hook reads gradients before they are clipped.
    """
    trainer, module, strategy = run.trainer, run.module, run.strategy
    read_by_hooks = bool(run.callbacks.hooks.on_before_optimizer_step) or is_overridden(
        "configure_gradient_clipping", module, TrainModule
    )
    clips = trainer.gradient_clip_val and not is_overridden("clip_gradients", strategy, Strategy)
    precision = strategy.precision
    return precision.scales_loss and (read_by_hooks or not clips or not precision.unscales_while_clipping)
