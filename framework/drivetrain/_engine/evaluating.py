"""Puts evaluation together: validation within fit, its trial before training, test and prediction by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain._engine.batches import Move
from drivetrain._loops.evaluate import EvaluateLoop
from drivetrain._loops.predict import PredictLoop
from drivetrain.strategies.strategy import StepRunner

if TYPE_CHECKING:
    from drivetrain._engine.session import Session


def build_evaluation(
    session: Session, stage: str, runner: StepRunner, move: Move | None, limits: Sequence[int | None] | None = None
) -> Callable[[], list[dict[str, float]]]:
    """Return what validates or tests ``session``'s module.

    Args:
        session: the run.
        stage: "validate" or "test".
        runner: the strategy's callable that every step runs through.
        move: brings a batch to the device.
        limits: micro-batches of each loader, for a trial whose values nobody logs; None for what the run reads.
    """
    assert session.data is not None
    strategy = session.strategy
    within_training = session.stage == "fit"
    give_out_buffers = session.buffers.give_out if within_training else partial(strategy.sync_buffers, session.module)
    return EvaluateLoop(
        stage,
        module=session.module,
        runner=runner,
        strategy=strategy,
        hooks=session.hooks,
        metrics=session.metrics,
        sources=session.data.sources[stage],
        limits=session.data.limits[stage] if limits is None else limits,
        lengths=session.lengths,
        move=move,
        give_out_buffers=give_out_buffers,
        inference_mode=_inference_mode(session),
        log=None if limits is not None else session.logger_call(),
    ).run


def build_validation(session: Session, runner: StepRunner, move: Move | None) -> Callable[[], list[dict[str, float]]]:
    """Return what validates ``session``'s module within fit, and leaves training's random draws and buffers alone."""
    run = build_evaluation(session, "validate", runner, move)

    def validate() -> list[dict[str, float]]:
        with _draws_apart(session), session.buffers.aside():
            return run()

    return validate


def build_prediction(session: Session, runner: StepRunner, move: Move | None) -> Callable[[], list[Any] | None]:
    """Return what predicts with ``session``'s module."""
    assert session.data is not None
    return PredictLoop(
        module=session.module,
        runner=runner,
        strategy=session.strategy,
        hooks=session.hooks,
        metrics=session.metrics,
        sources=session.data.sources["predict"],
        limits=session.data.limits["predict"],
        lengths=session.lengths,
        move=move,
        inference_mode=_inference_mode(session),
        keeps=session.return_predictions,
    ).run


def try_validation(session: Session, runner: StepRunner, move: Move | None) -> None:
    """Validate on a few micro-batches before training, so that what fails there fails at once; leaves no trace."""
    assert session.data is not None
    steps, hooks = session.trainer.num_sanity_val_steps, session.hooks
    limits = list(session.data.limits["validate"])
    if steps != -1:
        limits = [steps if limit is None else min(steps, limit) for limit in limits]
    session.sanity_checking = True
    with _draws_apart(session), session.buffers.aside():
        for hook in hooks.on_sanity_check_start:
            hook()
        build_evaluation(session, "validate", runner, move, limits)()
        session.monitors.note_validation()
        session.metrics.forget("validate")
        for hook in hooks.on_sanity_check_end:
            hook()
    session.sanity_checking = False


def _draws_apart(session: Session) -> AbstractContextManager[None]:
    """What is drawn within it, by loaders, steps and hooks, is drawn without moving any generator of training's."""
    from drivetrain.data._own_generators import own_generators  # by whoever validates

    data, module, datamodule = session.data, session.module, session.given.datamodule
    assert data is not None
    holders = [*data.loaders, *module.modules(), *session.callbacks, *([] if datamodule is None else [datamodule])]
    own = own_generators(*holders)
    return session.draws.aside(own)


def _inference_mode(session: Session) -> bool:
    # Sharded parameters are gathered into the same tensors again and again: ones that were made in inference mode break
    # a later training step, and on a copy that one rank holds by itself the very next forward.
    return session.trainer.inference_mode and not session.strategy.shards_parameters
