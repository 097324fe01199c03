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
from drivetrain.strategies.strategy import StepRunner, Strategy

logger = logging.getLogger("drivetrain")


def build_training(core: RunCore) -> TrainStep:
    """Build the training loop of a run, once it has its optimizers.

    Returns:
        The loop's step.
    """
    data, checkpoints = core.data, core.checkpoints
    assert checkpoints is not None
    _prepare_stopping(core)
    validate = build_validation(core) if data.validates else None
    trainer, metrics, strategy = core.trainer, core.metrics, core.strategy
    step = _build_step(core)
    if trainer.detect_anomaly:
        step.forward_backward = refusing_anomalies(step.forward_backward, core.progress, strategy.rank)
        step.run_weightless = refusing_anomalies(step.run_weightless, core.progress, strategy.rank)
    if strategy.rank == 0:
        strategy.precision.on_minimum_scale = partial(_warn_of_loss_scale, strategy.precision)
    if validate is not None:
        _warn_if_never_validates(core)
    core.loop = TrainLoop(
        step=step,
        reader=_build_reader(core),
        hooks=core.callbacks.hooks,
        control=strategy.control,
        progress=core.progress,
        position=core.position,
        stop=core.stop,
        max_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        log_every=max(0, trainer.log_every_n_steps),
        metrics=metrics,
        log=core.logger_call(),
        write_progress=core.callbacks.progress_writers(),
        lengths=data.lengths,
        checkpoints=checkpoints,
        snapshot=core.snapshot,
        rng_replay=data.rng_replay,
        schedulers=_build_schedulers(core),
        validation=ValidationPlan(
            validate,
            trainer.val_check_interval,
            trainer.check_val_every_n_epoch,
            data.train_length,
            core.progress,
            core.stop,
            metrics,
            warns=strategy.control.rank == 0,
            reloads=data.reload is not None,
        ),
        checks=EpochChecks(step, metrics, core.progress, strategy.rank == 0, partial(warn_of_unlogged_monitors, core)),
        reload=data.reload,
        apply_trainable_changes=partial(_apply_trainable_changes, core),
        resize=partial(data.resize_training, core.progress),
    )
    core.manual = step if isinstance(step, ManualStep) else None
    core.pass_over_data = partial(_pass_over_data, core)
    return step


def _apply_trainable_changes(core: RunCore) -> None:
    """Check the changes that hooks have made since the last epoch. Called at the beginning of each epoch."""
    core.callbacks.refuse_appended()
    assert core.trainables is not None
    core.trainables.adapt_strategy()


def _warn_if_never_validates(core: RunCore) -> None:
    """Warn if the run has fewer epochs than an interval between validations. A later run may have more epochs."""
    every, epochs = core.trainer.check_val_every_n_epoch, core.trainer.max_epochs
    if core.strategy.rank == 0 and every is not None and epochs is not None and 0 < epochs < every:
        logger.warning(
            "check_val_every_n_epoch=%d is more than max_epochs=%d: this run never validates. Lower "
            "check_val_every_n_epoch, or pass no validation data.",
            every,
            epochs,
        )


def _build_reader(core: RunCore) -> EpochReader:
    module, data = core.module, core.data
    is_weighed = module.automatic_optimization and is_overridden("batch_weight", module, TrainModule)
    reader = EpochReader(
        core.trainer,
        core.strategy,
        module.batch_weight if is_weighed else None,
        core.move,
        progress=core.progress,
        rng_replay=data.rng_replay,
        lengths=data.lengths,
        origin_of=data.epoch_position.origin,
    )
    reader.use(data.training)
    return reader


def _pass_over_data(core: RunCore) -> None:
    """Run the training step over an epoch's data without training."""
    from drivetrain._loops.evaluate import pass_over_training_data  # only some callbacks need it

    pass_over_training_data(core.data.training, core.module, core.runner, core.strategy, core.metrics, core.move)


def _prepare_stopping(core: RunCore) -> None:
    """Build the request that ends training early, and the snapshot with which a run can end within a window."""
    trainer = core.trainer
    max_time = None if trainer.max_time is None else parse_duration("max_time", trainer.max_time)
    core.stop = StopRequest(core.strategy.control, max_time, trainer.min_steps, trainer.min_epochs)
    # After a failure, only a run of one process can save.
    every_step = core.strategy.world_size == 1 and any(
        isinstance(callback, SavesOnException) and callback.save_on_exception for callback in core.callbacks
    )
    if every_step or (core.saves_on_signals and core.module.automatic_optimization):
        core.snapshot = WindowSnapshot(core.module, core.data.rng_replay, core.metrics, core.progress, every_step)


def estimated_steps(core: RunCore) -> int | float:
    """Return the number of optimizer steps of the whole run, from limits and the data; infinite without a bound."""
    return _count_steps(core, *core.data.counted_from)


def read_estimate(core: RunCore) -> int | float:
    """Return `estimated_steps` for user code, whose schedules may then depend on it.

    In `setup` of a fit, when no loaders exist yet, this function builds the training loader. It is then collective.
    """
    core.data.estimate_was_read = True
    if core.data.trains or core.stage != "fit":
        return estimated_steps(core)
    return _count_steps(core, core.data.length_before_loading())


def _count_steps(core: RunCore, length: int | None, epoch: int = 0, done: int = 0) -> int | float:
    """Return the number of steps of a run whose epochs from ``epoch`` on have ``length`` micro-batches each.

    Args:
        core: the run.
        length: the number of micro-batches of an epoch; None if it is unknown.
        epoch: the first epoch that has this length.
        done: the number of steps that were made before this epoch.
    """
    trainer = core.trainer
    if length is None or trainer.max_epochs in (None, -1):
        return math.inf if trainer.max_steps == -1 else trainer.max_steps
    schedule = next((callback for callback in core.callbacks if isinstance(callback, SchedulesWindows)), None)
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


def under_context(runner: StepRunner, precision: Precision) -> StepRunner:
    """Return a runner that enters the precision's forward context; ``runner`` itself if there is no context."""
    if not precision.has_forward_context:
        return runner
    # All steps share one context object, because building it costs more than entering it.
    context = precision.forward_context()

    def run(step: Callable[..., Any], *args: Any) -> Any:
        with context:
            return runner(step, *args)

    return run


def _build_schedulers(core: RunCore) -> Schedulers:
    data, module = core.data, core.module
    override = module.lr_scheduler_step if is_overridden("lr_scheduler_step", module, TrainModule) else None
    return Schedulers(
        core.optimization.schedulers if module.automatic_optimization else [],
        override,
        core.metrics,
        estimated_steps=estimated_steps(core),
        estimated_length=None if data.reload else data.train_length,
        estimate_was_read=data.estimate_was_read,
        warns=core.strategy.rank == 0,
    )


def _build_step(core: RunCore) -> TrainStep:
    data, optimization, trainables = core.data, core.optimization, core.trainables
    assert trainables is not None
    module, strategy = core.module, core.strategy
    parts = module, core.runner, strategy, core.callbacks.hooks, core.metrics, trainables
    if not module.automatic_optimization:
        _check_manual(core)
        return ManualStep(*parts, optimization.handles)
    automatic_parts = *parts, optimization, core.progress, _build_clipping(core), _unscales_first(core)
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


def _check_manual(core: RunCore) -> None:
    trainer = core.trainer
    for name, off in (("accumulate_grad_batches", (1,)), ("gradient_clip_val", (None, 0))):
        if (value := getattr(trainer, name)) not in off:
            raise ConfigurationError(
                f"{name}={value} with manual optimization.",
                "training_step itself runs backward, clips gradients and steps the optimizers.",
                f"leave out {name}; in training_step, step after several batches, or call self.clip_gradients.",
            )


def _build_clipping(core: RunCore) -> Callable[[Sequence[Optimizer]], Any] | None:
    """Return the function that clips gradients; None without clipping."""
    trainer, module, strategy = core.trainer, core.module, core.strategy
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if is_overridden("configure_gradient_clipping", module, TrainModule):

        def overridden(optimizers: Sequence[Optimizer]) -> None:
            for optimizer in optimizers:
                module.configure_gradient_clipping(
                    optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
                )

        return overridden
    _check_clip_by_value(core)
    if not value:
        return None

    def clip(optimizers: Sequence[Optimizer]) -> None:
        core.gradient_norm = strategy.clip_gradients(optimizers, value, algorithm)

    return clip


def _check_clip_by_value(core: RunCore) -> None:
    """Refuse clipping by value without a limit or of complex gradients, unless the strategy clips by itself."""
    trainer, module = core.trainer, core.module
    value = trainer.gradient_clip_val
    if trainer.gradient_clip_algorithm != "value" or is_overridden("clip_gradients", core.strategy, Strategy):
        return
    if value is None:
        raise ConfigurationError(
            "gradient_clip_algorithm='value' without gradient_clip_val.",
            "without a limit, gradients are not clipped.",
            "also set gradient_clip_val, or leave out gradient_clip_algorithm.",
        )
    for name, parameter in module.named_parameters():
        if value and parameter.requires_grad and parameter.is_complex():
            raise ConfigurationError(
                f"gradient_clip_algorithm='value' with {name!r}, which has dtype {parameter.dtype}.",
                "complex numbers have no order, so torch cannot clip them by value.",
                "use gradient_clip_algorithm='norm', or override configure_gradient_clipping.",
            )


def _unscales_first(core: RunCore) -> bool:
    """Return whether gradients with a loss scale are unscaled in a separate pass, rather than while they are clipped.

    A separate pass is needed if gradients are not clipped, or if a hook reads gradients before they are clipped.
    """
    trainer, module, strategy = core.trainer, core.module, core.strategy
    read_by_hooks = bool(core.callbacks.hooks.on_before_optimizer_step) or is_overridden(
        "configure_gradient_clipping", module, TrainModule
    )
    clips = trainer.gradient_clip_val and not is_overridden("clip_gradients", strategy, Strategy)
    precision = strategy.precision
    return precision.scales_loss and (read_by_hooks or not clips or not precision.unscales_while_clipping)
