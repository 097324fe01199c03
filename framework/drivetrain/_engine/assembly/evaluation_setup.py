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


def build_stage(core: RunCore) -> Callable[[], Any]:
    """Return a function that runs the stage: validate, test or predict. All ranks may end it early after a signal."""
    early = EarlyExit(core.stop, core.strategy) if core.saves_on_signals else None
    if core.stage != "predict":
        return _build_loop(EvaluateLoop, core, core.stage, early).run
    predict = partial(
        PredictLoop,
        keeps_outputs=core.request.return_predictions,
        get_predicted_checks=partial(_existing_predictions, core),
    )
    return _build_loop(predict, core, "predict", early).run


def _build_loop(
    kind: Callable[..., _Loop],
    core: RunCore,
    stage: str,
    early: EarlyExit | None = None,
    sanity_steps: int | None = None,
) -> _Loop:
    """Build the loop of a stage.

    Args:
        kind: the class of the loop.
        core: the run.
        stage: "validate", "test" or "predict".
        early: lets all ranks end the loop early after a signal; None if they always finish.
        sanity_steps: the number of micro-batches of each loader in a sanity check, whose values are not logged; -1 for
            all, None if this is no sanity check.
    """
    strategy, data, logs = core.strategy, core.data, stage != "predict" and sanity_steps is None
    return kind(
        stage=stage,
        module=core.module,
        runner=core.runner,
        strategy=strategy,
        hooks=core.callbacks.hooks,
        current=core.current,
        log=core.loop_log(sends=logs),
        sources=[loader.source for loader in data.evaluation[stage]],
        get_limits=lambda: _limits(data.resize_evaluation(stage), sanity_steps),
        move=_safe_mover(core, stage),
        sync_buffers=(
            partial(strategy.sync_buffers, core.module) if core.buffers is None else core.buffers.take_from_rank_0
        ),
        no_gradient=torch.inference_mode if _inference_mode(core) else torch.no_grad,
        early_exit=early,
    )


def build_validation(core: RunCore) -> Callable[[], list[dict[str, float]]]:
    """Return a function that validates within fit, and afterwards restores the generators and buffers of training."""
    early = ValidationExit(core.stop, core.strategy, core.module, core.metrics) if core.saves_on_signals else None
    buffers = core.buffers = core.buffers or EvaluationBuffers(core.module, core.strategy)
    evaluate = _build_loop(EvaluateLoop, core, "validate", early).run

    def validate() -> list[dict[str, float]]:
        snapshot = core.snapshot if core.progress.within_window else None
        with (
            snapshot.keep_evaluation_changes() if snapshot else nullcontext(),
            _separate_generators(core),
            buffers.restored_at_end(),
        ):
            core.validating = True
            try:
                with core.span("validation"):
                    return evaluate()
            except Exception:
                if early is not None:
                    with suppress(Exception):  # the device may have failed
                        early.undo()  # a checkpoint saved after this error resumes before this validation
                raise
            finally:
                core.validating = False

    return validate


def run_sanity_check(core: RunCore) -> None:
    """Validate on a few micro-batches before training, so that errors in the validation code appear early.

    Generators, buffers and logged values are restored afterwards. The names of these values stay in `sanity_names`.
    """
    steps, hooks, buffers = core.trainer.num_sanity_val_steps, core.callbacks.hooks, core.buffers
    assert buffers is not None
    core.sanity_checking = True
    with (
        core.span("sanity check"),
        _separate_generators(core),
        buffers.restored_at_end(),
        core.metrics.temporary("validate"),
    ):
        for hook in hooks.on_sanity_check_start:
            hook()
        _build_loop(EvaluateLoop, core, "validate", sanity_steps=steps).run()
        core.sanity_names = core.metrics.known_names()
        for hook in hooks.on_sanity_check_end:
            hook()
    core.sanity_checking = False


def _limits(limits: Sequence[int | None], steps: int | None) -> list[int | None]:
    """Return ``limits``, lowered to ``steps`` in a sanity check."""
    if steps is None or steps == -1:
        return list(limits)
    return [steps if limit is None else min(steps, limit) for limit in limits]


def goes_on_when_repeated(core: RunCore) -> bool:
    """Return whether the same call goes on where an interrupted run ended, instead of starting from the beginning.

    This holds for a fit, which saves, and for a prediction whose batches need not be computed again.
    """
    if core.stage == "predict":
        return not core.request.return_predictions and bool(_storing_callbacks(core))
    return core.stage == "fit"


def _storing_callbacks(core: RunCore) -> list[StoresPredictions]:
    return [callback for callback in core.callbacks if isinstance(callback, StoresPredictions)]


def _existing_predictions(core: RunCore) -> list[IsPredicted]:
    """Return each callback's function that finds stored predictions; empty if a callback has stored none."""
    stored = [callback.existing_predictions(core.trainer, core.module) for callback in _storing_callbacks(core)]
    return [part for part in stored if part is not None] if None not in stored else []


def _safe_mover(core: RunCore, stage: str) -> Move | None:
    """Return the run's mover; on CUDA, a version that is safe if loaders reuse a batch's memory during the copy."""
    move = core.move
    if move is None or core.strategy.device.type != "cuda":
        return move
    return safe_move(move, all(loader.source.fresh_memory for loader in core.data.evaluation[stage]))


def _separate_generators(core: RunCore) -> AbstractContextManager[None]:
    """Return a context in which random draws of loaders, steps and hooks do not advance training's generators."""
    from drivetrain._data.loader_generators import collect_generators  # only runs that validate need it

    datamodule = [] if core.datamodule is None else [core.datamodule]
    holders = [*core.data.loaders, *core.module.modules(), *core.callbacks, *datamodule]
    return core.data.rng_replay.aside(collect_generators(*holders))


def _inference_mode(core: RunCore) -> bool:
    # Training could not use a tensor that a validation within fit keeps, and steps that differentiate (meta-learning)
    # may enable gradients there. With sharded parameters, inference mode is not used either: parameters are gathered
    # into the same tensors repeatedly, and tensors created in inference mode would make a later forward fail.
    return core.trainer.inference_mode and core.stage != "fit" and not core.strategy.shards_parameters
