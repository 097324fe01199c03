"""The evaluation loop: validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.evaluation_interrupt import EarlyExit
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.loader_lengths import Lengths
from drivetrain._loops.progress import Position
from drivetrain._loops.step_arguments import StepArguments
from drivetrain._loops.uneven_inputs import leaving_no_trace
from drivetrain._metrics import MetricStore
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._sharding import BatchShard
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import StepRunner, Strategy

if TYPE_CHECKING:
    from drivetrain._loops.progress_reports import Pacing

NAMES = {"validate": "validation", "test": "test", "predict": "predict"}
"""What a stage is called in the names of its hooks and its step."""


@contextmanager
def evaluating(module: nn.Module, no_gradient: AbstractContextManager[Any]) -> Iterator[None]:
    """Within it the module is in eval mode and nothing is recorded for a backward; every child's flag comes back."""
    flags = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with no_gradient:
            yield
    finally:
        for child, training in flags:
            child.training = training
            # What a step made anew in inference mode could not be written to from here on.
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_inference():
                    child._buffers[name] = buffer.clone()


def evaluation_pairs(
    source: BatchSource, strategy: Strategy, name: str, first: int = 0
) -> Iterator[tuple[Any, BatchShard]]:
    """Return what this rank evaluates, from its micro-batch ``first`` on.

    Where it could leave the others waiting, it goes on until all are through.
    """
    pairs = source.epoch(0, first)
    if source.needs_order_check:
        from drivetrain._loops.data_order_checks import compared  # for whoever has such data

        pairs = compared(pairs, source, name, strategy)
    if source.shards_known or not strategy.collective_forward or strategy.world_size == 1:
        return pairs
    from drivetrain._loops.uneven_evaluation import until_all_are_through  # for whoever has such data

    return until_all_are_through(pairs, strategy)


class EvaluateLoop:
    """Runs ``validation_step`` or ``test_step`` over one or several loaders.

    Args:
        stage: "validate" or "test".
        module: whose step is run.
        runner: the strategy's callable that every step runs through.
        strategy: where.
        hooks: who overrode what.
        metrics: where steps log.
        position: told the batch that it has come to.
        sources: one for each loader.
        limits: micro-batches of each loader at most; None for all.
        lengths: says which loader's length proved wrong.
        move: brings a batch to the device: ``move(batch, dataloader_idx)``; None where it is there already.
        give_out_buffers: gives every rank rank 0's buffers.
        inference_mode: run in `torch.inference_mode` rather than `torch.no_grad`.
        pacing: tells callbacks how far it has come; None where none wants to know.
        log: sends reduced values to the loggers; None where there is none.
        early: lets the ranks leave before the end; None where they do not.
    """

    def __init__(
        self,
        stage: str,
        *,
        module: TrainModule,
        runner: StepRunner,
        strategy: Strategy,
        hooks: HookTable,
        metrics: MetricStore,
        position: Position,
        sources: Sequence[BatchSource],
        limits: Sequence[int | None],
        lengths: Lengths,
        move: Callable[[Any, int], Any] | None,
        give_out_buffers: Callable[[], object],
        inference_mode: bool,
        pacing: Pacing | None,
        log: Callable[[Mapping[str, Tensor | float]], None] | None,
        early: EarlyExit | None = None,
    ) -> None:
        self._stage = stage
        self._name = name = NAMES[stage]
        self._module = module
        self._run = runner
        self._strategy = strategy
        self._control: ControlPlane = strategy.control
        self._metrics = metrics
        self._position = position
        self._sources = sources
        self._limits = limits
        self._lengths = lengths
        self._move = move
        self._give_out_buffers = give_out_buffers
        self._inference_mode = inference_mode
        self._pacing = pacing
        self._log = log
        self._early = early
        self._step = getattr(module, f"{name}_step")
        self._arguments = StepArguments(self._step, several=len(sources) > 1)
        self._hooks = hooks
        self._batch_start = getattr(hooks, f"on_{name}_batch_start")
        self._batch_end = getattr(hooks, f"on_{name}_batch_end")

    def run(self) -> list[dict[str, float]]:
        """Evaluate all loaders; returns each loader's reduced values, none where the ranks leave before the end."""
        metrics, hooks, name, early = self._metrics, self._hooks, self._name, self._early
        if early is not None and early.at_once():
            return []
        self._give_out_buffers()
        gradient = torch.inference_mode() if self._inference_mode else torch.no_grad()
        with evaluating(self._module, gradient):
            metrics.enter(self._stage)
            if early is not None:
                early.begin()
            for hook in getattr(hooks, f"on_{name}_start"):
                hook()
            for hook in getattr(hooks, f"on_{name}_epoch_start"):
                hook()
            if early is not None:
                early.after_hooks()
            had_data = []
            if self._pacing is not None:
                self._pacing.before = 0
            for index, (source, limit) in enumerate(zip(self._sources, self._limits, strict=True)):
                metrics.dataloader_idx = index if len(self._sources) > 1 else None
                metrics.had_data = False
                if not self._evaluate(index, source, limit):
                    return []
                had_data.append(metrics.had_data)
            if early is not None:
                early.end()
            metrics.had_data = all(had_data)
            metrics.dataloader_idx = None
            results = self._reduce()
            epoch_end = getattr(hooks, f"on_{name}_epoch_end")
            for hook in epoch_end:
                hook()
            if epoch_end:
                results = self._reduce()  # with what these hooks logged
            metrics.reset_metrics()
            numbers = {key: float(value) for key, value in results.items()}
            loaders = {entry.epoch_name: entry.of_loader for entry in metrics.entries.values()}
            self._tell_loggers(numbers)
            metrics.enter(None)  # what is logged from here on would reach nobody
            for hook in getattr(hooks, f"on_{name}_end"):
                hook()
        return _by_loader(numbers, len(self._sources), loaders)

    def _evaluate(self, index: int, source: BatchSource, limit: int | None) -> bool:
        """Evaluate one loader; False where the ranks leave, and nothing has come of it."""
        metrics, arguments, run, step = self._metrics, self._arguments, self._run, self._step
        early = self._early
        leaves = None if early is None else early.look()
        several, came, position = len(self._sources) > 1, 0, self._position
        name = f"{self._name} loader {index}" if several else f"{self._name} loader"
        before = position.enter("evaluation")
        for batch_idx, (given, shard) in enumerate(self._pairs(source, limit, name)):
            position.batch_idx = batch_idx
            if shard.joins:
                came += shard.start >= 0  # nobody else's batch counts
                self._join(given, batch_idx, index)
                if leaves is not None and leaves():
                    break
                continue
            came += 1
            batch = given if self._move is None else self._move(given, index)
            metrics.batch = batch
            metrics.samples = shard.samples
            metrics.had_data = True
            where = (batch, batch_idx, index) if several else (batch, batch_idx)
            for hook in self._batch_start:
                hook(*where)
            outputs = run(step, *arguments(batch, batch_idx, index))
            for hook in self._batch_end:
                hook(outputs, *where)
            if leaves is not None and leaves():
                break
        metrics.batch = None
        position.leave(before)
        if early is not None and early.is_left(source.shards_known):
            early.undo()
            early.end()
            return False
        if self._pacing is not None:
            self._pacing.before += came
        self._lengths.note(name, source.length, came, over=limit is None or came < limit)
        return True

    def _pairs(self, source: BatchSource, limit: int | None, name: str) -> Iterator[tuple[Any, BatchShard]]:
        pairs = islice(evaluation_pairs(source, self._strategy, name), limit)
        return pairs if self._pacing is None else self._pacing.follow(pairs)

    def _join(self, given: Any, batch_idx: int, index: int) -> None:
        if not self._strategy.collective_forward:
            return
        batch = given if self._move is None else self._move(given, index)
        with leaving_no_trace(self._module, self._metrics):
            self._run(self._step, *self._arguments(batch, batch_idx, index))

    def _reduce(self) -> dict[str, torch.Tensor]:
        wanting, noticed = self._control.agree(
            "the reduction of an evaluation's values", self._metrics.wants_reduction(), self._lengths.noticed
        )
        self._lengths.settle(noticed)
        return self._metrics.reduce_epoch(together=wanting > 0 and self._control.world_size > 1)

    def _tell_loggers(self, numbers: dict[str, float]) -> None:
        if self._log is None:
            return
        wanted = {entry.epoch_name for entry in self._metrics.entries.values() if entry.logger}
        values: dict[str, Tensor | float] = {key: number for key, number in numbers.items() if key in wanted}
        values.update(self._metrics.flush_steps())
        if values:
            self._log(values)


def _by_loader(numbers: dict[str, float], count: int, loaders: Mapping[str, int | None]) -> list[dict[str, float]]:
    """Give each value to the loader that it is of, or first came from; to all what was logged beside them."""
    results: list[dict[str, float]] = [{} for _ in range(count)]
    for key, number in numbers.items():
        of_loader = loaders.get(key)
        for position, result in enumerate(results):
            if of_loader is None or of_loader == position:
                result[key] = number
    return results
