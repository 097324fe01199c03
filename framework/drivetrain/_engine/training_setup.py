"""Puts the training loop together: every feature picks its code path here, before the first step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from drivetrain._config.arguments import duration
from drivetrain._engine.batches import BatchMover, moved
from drivetrain._engine.session_state import SessionState
from drivetrain._engine.stage_data import StageData
from drivetrain._engine.stage_loaders import Dealing, find_loaders
from drivetrain._engine.window_snapshot import WindowOpening
from drivetrain._loops.closure_step import ClosureStep
from drivetrain._loops.epoch_checks import EpochWatch
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.loader_lengths import Tally
from drivetrain._loops.manual_step import ManualStep, OverriddenSteps
from drivetrain._loops.schedulers import Outlook, Schedulers
from drivetrain._loops.step import AutomaticStep, TrainStep
from drivetrain._loops.step_arguments import StepArguments
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.train import EpochData, TrainLimits, TrainLoop
from drivetrain._loops.validation import ValidationPlan
from drivetrain._loops.windows import (
    MicroBatch,
    Pairs,
    dealt_windows,
    exchanged_windows,
    single_windows,
    weighed_windows,
)
from drivetrain.data._batch_copies import copy_batch
from drivetrain.data._batch_source import NO_BATCH
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import StepRunner, Strategy

logger = logging.getLogger("drivetrain")


def build_training(
    run: SessionState,
    runner: StepRunner,
    move: BatchMover | None,
    *,
    settle: Callable[[], None],
    save: Callable[[], None],
    after_first_batch: Callable[[], None],
) -> TrainLoop:
    """Return the loop that trains the run's module.

    Args:
        run: gets what runs it, with manual optimization.
        runner: the strategy's callable that every step runs through.
        move: brings a batch to the device.
        settle: called as an epoch begins.
        save: writes what a later run goes on from, where this one is asked to leave. Collective.
        after_first_batch: called once, after the first micro-batch, on one rank.
    """
    trainer, metrics, strategy = run.trainer, run.metrics, run.strategy
    step = run.profiling.step(_step(run, runner))
    if trainer.detect_anomaly:
        from drivetrain._loops.anomaly import AnomalyStep

        step = AnomalyStep(step, run.progress, strategy.rank)
    if strategy.rank == 0:
        strategy.precision.at_floor = _SaysOnce()
    module = run.module
    scheduler_step = module.lr_scheduler_step if is_overridden("lr_scheduler_step", module, TrainModule) else None
    data = run.data
    assert data is not None
    return run.profiling.train_loop(
        step=step,
        data=epoch_data(run, move),
        hooks=run.hooks,
        metrics=metrics,
        progress=run.progress,
        position=run.position,
        limits=TrainLimits(trainer.max_epochs, trainer.max_steps, trainer.log_every_n_steps),
        stop=run.stop,
        schedulers=Schedulers(
            run.schedulers if module.automatic_optimization else [],
            scheduler_step,
            metrics.agreed,
            lambda: list(metrics.callback_metrics()),
            Outlook(estimated_steps(run, data), None if run.reload else data.train_length, run.estimate_was_read),
            tells=strategy.rank == 0,
        ),
        validation=ValidationPlan(
            run.validate,
            trainer.val_check_interval,
            trainer.check_val_every_n_epoch,
            data.train_length,
            run.stop,
            metrics,
            tells=strategy.control.rank == 0,
            changes=run.reload is not None,
        ),
        control=strategy.control,
        lengths=run.lengths,
        log=run.logger_call(),
        pacing=run.pacing(),
        saves=run.saves,
        draws=run.draws,
        save=save,
        settle=settle,
        watch=EpochWatch(step, metrics, type(module).__name__, strategy.rank == 0, after_first_batch),
        opening=run.opening,
        reload=run.reload,
    )


def epoch_data(run: SessionState, move: BatchMover | None) -> EpochData:
    """Return what an epoch is trained on, as the run's data are now."""
    data = run.data
    assert data is not None
    assert data.train is not None
    tally = Tally("training loader", data.train.length, not data.train.shards_known, run.lengths)
    ended = _Ended()
    return EpochData(
        micro_batches=run.profiling.windows(_micro_batches(run, move, tally, ended)),
        exhausted=lambda: ended.seen,
        length=data.train_length,
        length_is_exact=data.train_certain or data.train.stateful,
        tally=tally,
    )


def build_training_pass(run: SessionState, runner: StepRunner, move: BatchMover | None) -> Callable[[], None]:
    """Return what runs the module's training step over an epoch's data and trains nothing."""

    def run_pass() -> None:
        from drivetrain._loops.statistics_pass import pass_over_training_data  # by whoever asks for it

        data = run.data
        assert data is not None
        assert data.train is not None
        pass_over_training_data(
            data.train,
            data.train_limit,
            module=run.module,
            runner=runner,
            strategy=run.strategy,
            metrics=run.metrics,
            move=move,
        )

    return run_pass


def set_up_stopping(run: SessionState) -> None:
    """Settle who may end the run early, and where: within a window that has several micro-batches, too."""
    trainer = run.trainer
    max_time = None if trainer.max_time is None else duration(trainer.max_time)
    run.stop = StopRequest(run.strategy.control, max_time, trainer.min_steps, trainer.min_epochs)
    source = None if run.data is None else run.data.train
    if source is not None and run.leaves_on_signals and run.module.automatic_optimization:
        run.opening = WindowOpening(
            run.module, source, run.draws, run.metrics, run.progress, lambda: trainer.accumulate_grad_batches
        )


def estimated_steps(run: SessionState, data: StageData | None) -> int | float:
    """Return the optimizer steps of the whole run by limits and lengths; infinite where neither bounds it."""
    trainer = run.trainer
    length = run.first_length
    if length is None and data is not None:
        length = data.train_length
    if length is None or trainer.max_epochs in (None, -1):
        return math.inf if trainer.max_steps == -1 else trainer.max_steps
    schedule = next((one for one in run.callbacks if one.window_of(0) is not None), None)
    if schedule is None:
        steps = math.ceil(length / trainer.accumulate_grad_batches) * trainer.max_epochs
    else:
        windows = (schedule.window_of(epoch) or 1 for epoch in range(trainer.max_epochs))
        steps = sum(math.ceil(length / window) for window in windows)
    return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)


def estimated_before_data(run: SessionState) -> int | float:
    """Return the same in ``setup``: the training loader is asked for, which the run then reads. Collective."""
    strategy, given = run.strategy, run.given
    run.given = replace(given, asked_for=find_loaders("train", given.train, given.datamodule, run.module))
    dealing = Dealing(strategy.data_rank, strategy.data_world_size, 0, run.trainer.use_distributed_sampler)
    data = StageData(run.trainer, "train", run.module, run.given, dealing, strategy.control)
    data.close()
    return estimated_steps(run, data)


class _SaysOnce:
    """Says that the loss scale has come to its floor."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, scale: float) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "The loss scale has fallen to its floor, 2^%d: gradients in fp16 were not finite over and over, "
                "small as the loss was made, and each such step was skipped. Look whether the loss itself is NaN "
                "(detect_anomaly=True, NonFiniteGuard), or train in 'bf16-mixed'. Said once.",
                round(math.log2(scale)),
            )


def under_context(runner: StepRunner, precision: Precision) -> StepRunner:
    """Return a runner whose steps run in the precision's forward context; the same one where it has none."""
    if not precision.has_forward_context:
        return runner
    # One context, entered anew by each step: building it costs more than entering it.
    context = precision.forward_context()

    def run(step: Callable[..., Any], *args: Any) -> Any:
        with context:
            return runner(step, *args)

    return run


def _step(run: SessionState, runner: StepRunner) -> TrainStep:
    module, strategy, hooks = run.module, run.strategy, run.hooks
    takes = StepArguments(module.training_step)
    arguments = None if takes.takes_batch_idx and not takes.takes_dataloader_idx else takes
    if not module.automatic_optimization:
        _check_manual(run)
        run.manual = ManualStep(module, runner, strategy, run.handles, hooks, run.metrics, run.trainables, arguments)
        return run.manual
    kind: Callable[..., TrainStep] = AutomaticStep
    if run.closure:
        assert run.data is not None
        assert run.data.train is not None
        kind = partial(ClosureStep, fresh_memory=run.data.train.fresh_memory and run.reload is None)
        if strategy.precision.scales_loss:
            raise ConfigurationError(
                f"precision={strategy.precision.name!r} with {type(run.optimizers[0]).__name__}.",
                "it evaluates the loss several times a step, and each evaluation may overflow by itself.",
                "use precision='bf16-mixed' or '32-true'.",
            )
    steps = None
    if is_overridden("optimizer_step", module, TrainModule):
        steps = OverriddenSteps(module, run.handles, run.progress)
    return kind(
        module,
        runner,
        strategy,
        run.optimizers,
        hooks,
        run.metrics,
        run.trainables,
        _clipping(run),
        arguments,
        steps,
        _unscales_apart(run),
    )


def _check_manual(run: SessionState) -> None:
    trainer = run.trainer
    for name, value, idle in (
        ("accumulate_grad_batches", trainer.accumulate_grad_batches, 1),
        ("gradient_clip_val", trainer.gradient_clip_val, None),
    ):
        if value != idle and not (name == "gradient_clip_val" and value == 0):
            raise ConfigurationError(
                f"{name}={value} with manual optimization.",
                "training_step runs backward and steps itself.",
                f"drop {name}; step every so many batches, or call self.clip_gradients, in training_step.",
            )


def _clipping(run: SessionState) -> Callable[[Sequence[Optimizer]], Any] | None:
    trainer, module, strategy = run.trainer, run.module, run.strategy
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if is_overridden("configure_gradient_clipping", module, TrainModule):

        def overridden(optimizers: Sequence[Optimizer]) -> None:
            for optimizer in optimizers:
                module.configure_gradient_clipping(optimizer, value, algorithm)

        return overridden
    if not value:
        return None

    def clip(optimizers: Sequence[Optimizer]) -> None:
        run.gradient_norm = strategy.clip_gradients(optimizers, value, algorithm)

    return clip


def _unscales_apart(run: SessionState) -> bool:
    """Whether scaled gradients are unscaled in a pass of their own: where nothing clips, or somebody looks before."""
    trainer, module, strategy = run.trainer, run.module, run.strategy
    looked_at = bool(run.hooks.on_before_optimizer_step) or is_overridden(
        "configure_gradient_clipping", module, TrainModule
    )
    clips = trainer.gradient_clip_val and not is_overridden("clip_gradients", strategy, Strategy)
    precision = strategy.precision
    return precision.scales_loss and (looked_at or not clips or not precision.clips_scaled)


class _Ended:
    """Knows whether the data of the epoch under way came to its end."""

    def __init__(self) -> None:
        self.seen = False

    def follow(self, pairs: Pairs) -> Pairs:
        """Return ``pairs``, at whose end it is known."""
        yield from pairs
        self.seen = True


def _micro_batches(
    run: SessionState, move: BatchMover | None, tally: Tally, ended: _Ended
) -> Callable[[int, int], Iterator[MicroBatch]]:
    """Return what begins an epoch: ``micro_batches(epoch, first)``."""
    data, strategy, trainer, module = run.data, run.strategy, run.trainer, run.module
    assert data is not None
    assert data.train is not None
    source = run.profiling.source(data.train)
    weigh = module.batch_weight if is_overridden("batch_weight", module, TrainModule) else None
    if not module.automatic_optimization:
        weigh = None
    ranks = strategy.data_world_size
    exchanged = ranks > 1 and (weigh is not None or not source.shards_known)
    read_ahead = source.in_process and (exchanged or strategy.device.type == "cuda")
    trained = (lambda: run.progress.batch_idx) if read_ahead else None

    def begin(epoch: int, first: int) -> Iterator[MicroBatch]:
        limit, size = data.train_limit, trainer.accumulate_grad_batches
        origin = run.cursor.origin(epoch)
        # What is left of an epoch that began under another dealing ends with its data.
        room = None if limit is None or (origin.samples and limit == source.length) else max(0, limit - first)
        # The epoch's order stays the first one's where the run overfits a few batches.
        order = 0 if trainer.overfit_batches else epoch
        pairs = source.epoch(order, first, origin)
        ended.seen = False
        if source.stateful:  # at its end it may begin anew, and a checkpoint would keep that for the epoch's place
            pairs = ended.follow(pairs)
        if not origin.samples:
            pairs = tally.follow(pairs, first)
        pairs = run.draws.follow(pairs, first, trained)
        if source.needs_order_check:
            from drivetrain._loops.data_order_checks import compared  # for whoever has such data

            pairs = compared(pairs, source, "training loader", strategy)
        shards = None if exchanged or weigh is not None else source.shards(order, first, origin)
        fresh_memory = source.fresh_memory
        if not fresh_memory and shards is None and (size > 1 or (exchanged and not source.stateful)):
            # These wait for their turn while others are read, which the loader may write into the same memory.
            pairs = ((copy_batch(batch), shard) for batch, shard in pairs)
            fresh_memory = True
        if room is not None:
            pairs = islice(pairs, room)
            shards = shards and islice(shards, room)
        if exchanged:
            micro_batches = exchanged_windows(
                pairs,
                size,
                strategy.control,
                weigh,
                room,
                ranks,
                strategy.is_data_leader,
                last=getattr(source, "last", NO_BATCH),
                ahead=not source.stateful,
            )
        elif ranks == 1 and size == 1 and weigh is None:
            micro_batches = single_windows(pairs)
        elif weigh is not None:
            micro_batches = weighed_windows(pairs, size, weigh)
        else:
            micro_batches = dealt_windows(pairs, size, ranks, shards)
        return moved(micro_batches, move, ahead=not source.stateful, fresh_memory=fresh_memory)

    return begin
