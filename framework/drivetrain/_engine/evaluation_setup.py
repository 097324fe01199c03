"""Puts evaluation together: validation within fit, its trial before training, test and prediction by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from drivetrain._engine.batches import Move, safely
from drivetrain._engine.session_state import SessionState
from drivetrain._loops.evaluate import EvaluateLoop
from drivetrain._loops.evaluation_interrupt import EarlyExit
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.predict import PredictLoop, There
from drivetrain.callback import Callback
from drivetrain.strategies.strategy import StepRunner


def build_evaluation(
    run: SessionState,
    stage: str,
    runner: StepRunner,
    move: Move | None,
    limits: Sequence[int | None] | None = None,
    early: EarlyExit | None = None,
) -> Callable[[], list[dict[str, float]]]:
    """Return what validates or tests the run's module.

    Args:
        run: the run.
        stage: "validate" or "test".
        runner: the strategy's callable that every step runs through.
        move: brings a batch to the device.
        limits: micro-batches of each loader, for a trial whose values nobody logs; None for what the run reads.
        early: lets the ranks leave before the end; None where they do not.
    """
    assert run.data is not None
    strategy = run.strategy
    within_training = run.stage == "fit"
    give_out_buffers = run.buffers.give_out if within_training else partial(strategy.sync_buffers, run.module)
    return EvaluateLoop(
        stage,
        module=run.module,
        runner=runner,
        strategy=strategy,
        hooks=run.hooks,
        metrics=run.metrics,
        position=run.position,
        sources=[run.profiling.evaluated(one) for one in run.data.sources[stage]],
        limits=run.data.limits[stage] if limits is None else limits,
        lengths=run.lengths,
        move=_safe(run, stage, move),
        give_out_buffers=give_out_buffers,
        inference_mode=_inference_mode(run),
        pacing=run.pacing(),
        log=None if limits is not None else run.logger_call(),
        early=early,
    ).run


def build_validation(run: SessionState, runner: StepRunner, move: Move | None) -> Callable[[], list[dict[str, float]]]:
    """Return what validates the run's module within fit, and leaves training's random draws and buffers alone."""
    early = None
    if run.leaves_on_signals:
        early = EarlyExit(run.stop, run.module, run.metrics, run.strategy)
    evaluate = build_evaluation(run, "validate", runner, move, early=early)

    def validate() -> list[dict[str, float]]:
        within = run.opening if run.progress.within_window else None
        with within.evaluating() if within else nullcontext(), _draws_apart(run), run.buffers.aside():
            run.validating = True
            try:
                with run.profiling.span("validation"):
                    return evaluate()
            except Exception:
                if early is not None:
                    with suppress(Exception):  # on a device that has failed
                        early.undo()  # a run that is saved now validates anew
                raise
            finally:
                run.validating = False

    return validate


def _safe(run: SessionState, stage: str, move: Move | None) -> Move | None:
    assert run.data is not None
    if move is None or run.strategy.device.type != "cuda":
        return move
    return safely(move, all(source.fresh_memory for source in run.data.sources[stage]))


def build_prediction(run: SessionState, runner: StepRunner, move: Move | None) -> Callable[[], list[Any] | None]:
    """Return what predicts with the run's module."""
    assert run.data is not None
    return PredictLoop(
        module=run.module,
        runner=runner,
        strategy=run.strategy,
        hooks=run.hooks,
        metrics=run.metrics,
        position=run.position,
        sources=[run.profiling.evaluated(one) for one in run.data.sources["predict"]],
        limits=run.data.limits["predict"],
        lengths=run.lengths,
        move=_safe(run, "predict", move),
        inference_mode=_inference_mode(run),
        pacing=run.pacing(),
        keeps=run.return_predictions,
        before=partial(_predicted_before, run),
    ).run


def _predicted_before(run: SessionState) -> list[There]:
    """What the callbacks that keep outputs say is there from before; nothing where one of them has nothing."""
    asked = [one for one in run.callbacks if is_overridden("predicted_before", one, Callback)]
    told = [one.predicted_before(run.trainer, run.module) for one in asked]
    return [there for there in told if there is not None] if None not in told else []


def try_validation(run: SessionState, runner: StepRunner, move: Move | None, note: Callable[[], None]) -> None:
    """Validate on a few micro-batches before training, so that what fails there fails at once; leaves no trace.

    Args:
        run: the run.
        runner: the strategy's callable that every step runs through.
        move: brings a batch to the device.
        note: called once it is through, before what it logged is forgotten.
    """
    assert run.data is not None
    steps, hooks = run.trainer.num_sanity_val_steps, run.hooks
    limits = list(run.data.limits["validate"])
    if steps != -1:
        limits = [steps if limit is None else min(steps, limit) for limit in limits]
    run.sanity_checking = True
    with run.profiling.span("sanity check"), _draws_apart(run), run.buffers.aside():
        for hook in hooks.on_sanity_check_start:
            hook()
        build_evaluation(run, "validate", runner, move, limits)()
        note()
        for hook in hooks.on_sanity_check_end:
            hook()
        run.metrics.forget("validate")
    run.sanity_checking = False


def _draws_apart(run: SessionState) -> AbstractContextManager[None]:
    """What is drawn within it, by loaders, steps and hooks, is drawn without moving any generator of training's."""
    from drivetrain.data._loader_generators import collect_generators  # by whoever validates

    data, module, datamodule = run.data, run.module, run.given.datamodule
    assert data is not None
    holders = [*data.loaders, *module.modules(), *run.callbacks, *([] if datamodule is None else [datamodule])]
    own = collect_generators(*holders)
    return run.draws.aside(own)


def _inference_mode(run: SessionState) -> bool:
    # Sharded parameters are gathered into the same tensors again and again: ones that were made in inference mode break
    # a later training step, and on a copy that one rank holds by itself the very next forward.
    return run.trainer.inference_mode and not run.strategy.shards_parameters
