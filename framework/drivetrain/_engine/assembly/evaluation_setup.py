"""Builds the loops of validation within fit, of the sanity check, and of `validate`, `test` and `predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import torch

from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.evaluation_buffers import EvaluationBuffers
from drivetrain._loops.batch_mover import Move, safe_move
from drivetrain._loops.evaluate import EvaluateLoop
from drivetrain._loops.evaluation_interrupt import EarlyExit, ValidationExit
from drivetrain._loops.predict import IsPredicted, PredictLoop
from drivetrain.callback import StoresPredictions

_Loop = TypeVar("_Loop", EvaluateLoop, PredictLoop)


def build_stage(run: RunCore) -> Callable[[], Any]:
    """Return a function that runs the stage: validate, test or predict. All ranks may end it early after a signal."""
    early = EarlyExit(run.stop, run.strategy) if run.saves_on_signals else None
    if run.stage != "predict":
        return _build_loop(EvaluateLoop, run, run.stage, early).run
    predict = partial(
        PredictLoop,
        keeps_outputs=run.request.return_predictions,
        get_predicted_checks=partial(_existing_predictions, run),
    )
    return _build_loop(predict, run, "predict", early).run


def _build_loop(
    kind: Callable[..., _Loop],
    run: RunCore,
    stage: str,
    early: EarlyExit | None = None,
    sanity_steps: int | None = None,
) -> _Loop:
    """Build the loop of a stage.

    Args:
        kind: the class of the loop.
        run: the run.
        stage: "validate", "test" or "predict".
        early: lets all ranks end the loop early after a signal; None if they always finish.
        sanity_steps: the number of micro-batches of each loader in a sanity check, whose values are not logged; -1 for
            all, None if this is no sanity check.
    """
    strategy, data, logs = run.strategy, run.data, stage != "predict" and sanity_steps is None
    return kind(
        stage=stage,
        module=run.module,
        runner=run.runner,
        strategy=strategy,
        hooks=run.callbacks.hooks,
        current=run.current,
        log=run.loop_log(sends=logs),
        sources=[loader.source for loader in data.evaluation[stage]],
        get_limits=lambda: _limits(data.resize_evaluation(stage), sanity_steps),
        move=_safe_mover(run, stage),
        sync_buffers=(
            partial(strategy.sync_buffers, run.module) if run.buffers is None else run.buffers.take_from_rank_0
        ),
        no_gradient=torch.inference_mode if _inference_mode(run) else torch.no_grad,
        early_exit=early,
    )


def build_validation(run: RunCore) -> Callable[[], list[dict[str, float]]]:
    """Return a function that validates within fit, and afterwards restores the generators and buffers of training."""
    early = ValidationExit(run.stop, run.strategy, run.module, run.metrics) if run.saves_on_signals else None
    buffers = run.buffers = run.buffers or EvaluationBuffers(run.module, run.strategy)
    evaluate = _build_loop(EvaluateLoop, run, "validate", early).run

    def validate() -> list[dict[str, float]]:
        snapshot = run.snapshot if run.progress.within_window else None
        with (
            snapshot.keep_evaluation_changes() if snapshot else nullcontext(),
            _separate_generators(run),
            buffers.restored_at_end(),
        ):
            run.validating = True
            try:
                with run.span("validation"):
                    return evaluate()
            except Exception:
                if early is not None:
                    with suppress(Exception):  # the device may have failed
                        early.undo()  # a checkpoint saved after this error resumes before this validation
                raise
            finally:
                run.validating = False

    return validate


def run_sanity_check(run: RunCore) -> None:
    """Validate on a few micro-batches before training, so that errors in the validation code appear early.

    Generators, buffers and logged values are restored afterwards. The names of these values stay in `sanity_names`.
    """
    steps, hooks, buffers = run.trainer.num_sanity_val_steps, run.callbacks.hooks, run.buffers
    assert buffers is not None
    run.sanity_checking = True
    with (
        run.span("sanity check"),
        _separate_generators(run),
        buffers.restored_at_end(),
        run.metrics.temporary("validate"),
    ):
        for hook in hooks.on_sanity_check_start:
            hook()
        _build_loop(EvaluateLoop, run, "validate", sanity_steps=steps).run()
        run.sanity_names = run.metrics.known_names()
        for hook in hooks.on_sanity_check_end:
            hook()
    run.sanity_checking = False


def _limits(limits: Sequence[int | None], steps: int | None) -> list[int | None]:
    """Return ``limits``, lowered to ``steps`` in a sanity check."""
    if steps is None or steps == -1:
        return list(limits)
    return [steps if limit is None else min(steps, limit) for limit in limits]


def _existing_predictions(run: RunCore) -> list[IsPredicted]:
    """Return each callback's function that finds stored predictions; empty if a callback has stored none."""
    storing = [callback for callback in run.callbacks if isinstance(callback, StoresPredictions)]
    stored = [callback.existing_predictions(run.trainer, run.module) for callback in storing]
    return [part for part in stored if part is not None] if None not in stored else []


def _safe_mover(run: RunCore, stage: str) -> Move | None:
    """Return the run's mover; on CUDA, a version that is safe if loaders reuse a batch's memory during the copy."""
    move = run.move
    if move is None or run.strategy.device.type != "cuda":
        return move
    return safe_move(move, all(loader.source.fresh_memory for loader in run.data.evaluation[stage]))


def _separate_generators(run: RunCore) -> AbstractContextManager[None]:
    """Return a context in which random draws of loaders, steps and hooks do not advance training's generators."""
    from drivetrain._data.loader_generators import collect_generators  # only runs that validate need it

    datamodule = [] if run.datamodule is None else [run.datamodule]
    holders = [*run.data.loaders, *run.module.modules(), *run.callbacks, *datamodule]
    return run.data.rng_replay.aside(collect_generators(*holders))


def _inference_mode(run: RunCore) -> bool:
    # Training could not use a tensor that a validation within fit keeps, and steps that differentiate (meta-learning)
    # may enable gradients there. With sharded parameters, inference mode is not used either: parameters are gathered
    # into the same tensors repeatedly, and tensors created in inference mode would make a later forward fail.
    return run.trainer.inference_mode and run.stage != "fit" and not run.strategy.shards_parameters
