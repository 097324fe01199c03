"""A pass over the training data without training, to recompute statistics such as those of batch norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drivetrain._data.batch_source import LimitedSource
from drivetrain._loops.evaluation_batches import evaluation_batches
from drivetrain._loops.step_arguments import StepArguments, WrappedModule
from drivetrain._loops.uneven_inputs import LoggingPaused, without_side_effects
from drivetrain._metrics import MetricStore


def pass_over_training_data(
    data: LimitedSource,
    wrapped: WrappedModule,
    metrics: MetricStore,
    move: Callable[[Any, int], Any] | None,
) -> None:
    """Call ``training_step`` on an epoch's micro-batches, without gradients, hooks or logging. Collective.

    Args:
        data: the training batches.
        wrapped: the module, in train mode, and the strategy that runs it.
        metrics: the logged values, to which nothing is added.
        move: moves a batch to the device; None if batches are already on the device.
    """
    module, strategy, runner = wrapped.module, wrapped.strategy, wrapped.runner
    step = module.training_step
    arguments = StepArguments(step)
    metrics.enter("train", reset=False)
    paused = LoggingPaused(metrics)
    try:
        with torch.no_grad():
            batches = evaluation_batches(data.source, strategy, "training loader", data.limit)
            for batch_idx, (host_batch, shard) in enumerate(batches):
                if shard.joins and not strategy.collective_forward:
                    continue
                batch = host_batch if move is None else move(host_batch, 0)
                if shard.joins:
                    with without_side_effects(module, metrics):
                        runner(step, *arguments(batch, batch_idx))
                else:
                    runner(step, *arguments(batch, batch_idx))
    finally:
        paused.end()
        metrics.enter(None)
