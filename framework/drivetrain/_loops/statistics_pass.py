"""A pass over the training data that trains nothing: for statistics of weights that were put in the module."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from drivetrain._loops.evaluate import evaluation_pairs
from drivetrain._loops.step_arguments import StepArguments
from drivetrain._loops.uneven_inputs import Muted, leaving_no_trace
from drivetrain._metrics import MetricStore
from drivetrain.data._batch_source import BatchSource
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import StepRunner, Strategy


def pass_over_training_data(
    source: BatchSource,
    limit: int | None,
    *,
    module: TrainModule,
    runner: StepRunner,
    strategy: Strategy,
    metrics: MetricStore,
    move: Callable[[Any, int], Any] | None,
) -> None:
    """Call ``training_step`` on an epoch's micro-batches, without gradients, hooks or logging. Collective.

    Args:
        source: of the training data.
        limit: micro-batches at most; None for all.
        module: whose step; in train mode, as it was trained.
        runner: the strategy's callable that every step runs through.
        strategy: where.
        metrics: where the step logs what is not to be kept.
        move: brings a batch to the device; None where it is there already.
    """
    step = module.training_step
    arguments = StepArguments(step)
    metrics.enter("train", reset=False)
    muted = Muted(metrics)
    try:
        with torch.no_grad():
            pairs = islice(evaluation_pairs(source, strategy, "training loader"), limit)
            for batch_idx, (given, shard) in enumerate(pairs):
                if shard.joins and not strategy.collective_forward:
                    continue
                batch = given if move is None else move(given, 0)
                if shard.joins:
                    with leaving_no_trace(module, metrics):
                        runner(step, *arguments(batch, batch_idx))
                else:
                    runner(step, *arguments(batch, batch_idx))
    finally:
        muted.end()
        metrics.enter(None)
