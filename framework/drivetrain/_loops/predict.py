"""The prediction loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._loops.evaluate import evaluating, evaluation_pairs
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.loader_lengths import Lengths
from drivetrain._loops.progress import Position
from drivetrain._loops.step_arguments import StepArguments
from drivetrain._loops.uneven_inputs import leaving_no_trace
from drivetrain._metrics import MetricStore
from drivetrain.data._batch_source import BatchSource
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import StepRunner, Strategy

if TYPE_CHECKING:
    from drivetrain._loops.progress_reports import Pacing

There = Callable[[Sequence[Any] | None, int, int], bool]


class PredictLoop:
    """Runs ``predict_step`` over one or several loaders and gathers what it returns.

    Args:
        module: whose step is run.
        runner: the strategy's callable that every step runs through.
        strategy: where.
        hooks: who overrode what.
        metrics: told the stage, in which nothing may be logged.
        position: told the batch that it has come to.
        sources: one for each loader.
        limits: micro-batches of each loader at most; None for all.
        lengths: says which loader's length proved wrong.
        move: brings a batch to the device: ``move(batch, dataloader_idx)``; None where it is there already.
        inference_mode: run in `torch.inference_mode` rather than `torch.no_grad`.
        pacing: tells callbacks how far it has come; None where none wants to know.
        keeps: keep what the steps return, for `run` to return it.
        before: asked once, returns what tells of a batch whether its outputs are there from an earlier run:
            ``there(indices, batch_idx, dataloader_idx)``, each of which must say so. Empty where nothing was.
    """

    def __init__(
        self,
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
        inference_mode: bool,
        pacing: Pacing | None,
        keeps: bool,
        before: Callable[[], Sequence[There]],
    ) -> None:
        self._module = module
        self._run = runner
        self._strategy = strategy
        self._hooks = hooks
        self._metrics = metrics
        self._position = position
        self._sources = sources
        self._limits = limits
        self._lengths = lengths
        self._move = move
        self._inference_mode = inference_mode
        self._pacing = pacing
        self._keeps = keeps
        self._before = before
        self._there: Sequence[There] = ()
        # The plain one predicts alike on every loader.
        several = len(sources) > 1 and is_overridden("predict_step", module, TrainModule)
        self._arguments = StepArguments(module.predict_step, several)

    def run(self) -> list[Any] | None:
        """Predict; returns each micro-batch's output in data-set order, on every rank; a list for each loader.

        None where nothing is kept.
        """
        hooks = self._hooks
        self._strategy.sync_buffers(self._module)
        gradient = torch.inference_mode() if self._inference_mode else torch.no_grad()
        with evaluating(self._module, gradient):
            self._metrics.enter("predict")
            for hook in (*hooks.on_predict_start, *hooks.on_predict_epoch_start):
                hook()
            self._there = () if self._keeps else self._before()
            own = [
                self._predict(index, source, limit)
                for index, (source, limit) in enumerate(zip(self._sources, self._limits, strict=True))
            ]
            for hook in (*hooks.on_predict_epoch_end, *hooks.on_predict_end):
                hook()
        self._metrics.enter(None)
        (noticed,) = self._strategy.control.agree("the end of prediction", self._lengths.noticed)
        self._lengths.settle(noticed)
        if not self._keeps:
            return None
        from drivetrain._loops.outputs import exchange

        outputs = [_merged(exchange(part, self._strategy.control)) for part in own]
        return outputs[0] if len(outputs) == 1 else outputs

    def _predict(self, index: int, source: BatchSource, limit: int | None) -> list[tuple[int, int, Any]]:
        from drivetrain._loops.outputs import on_host  # by whoever predicts

        several = len(self._sources) > 1
        kept, position = [], self._position
        name = f"prediction loader {index}" if several else "prediction loader"
        before = position.enter("prediction")
        came = first = self._first(index, source, limit) if self._there else 0
        told = source.requested_indices()
        pairs = evaluation_pairs(source, self._strategy, name, first)
        pairs = islice(pairs, None if limit is None else limit - first)
        if self._pacing is not None:
            self._pacing.before += first
            pairs = self._pacing.follow(pairs)
        for batch_idx, (given, shard) in enumerate(pairs, first):
            position.batch_idx = batch_idx
            indices = None if told is None else next(told, None)
            position.indices = None if shard.joins else indices
            came += not shard.joins or shard.start >= 0  # nobody else's batch counts
            is_there = bool(self._there) and (shard.joins or self._is_there(indices, batch_idx, index))
            if self._together and self._there and self._all_there(is_there):
                continue
            if (shard.joins or is_there) and not self._together:
                continue
            batch = given if self._move is None else self._move(given, index)
            arguments = self._arguments(batch, batch_idx, index)
            if shard.joins or is_there:
                with leaving_no_trace(self._module, self._metrics):
                    self._run(self._module.predict_step, *arguments)
                continue
            where = (batch, batch_idx, index) if several else (batch, batch_idx)
            for hook in self._hooks.on_predict_batch_start:
                hook(*where)
            output = self._run(self._module.predict_step, *arguments)
            for hook in self._hooks.on_predict_batch_end:
                hook(output, *where)
            if self._keeps:
                start = shard.start if source.shards_known else batch_idx
                kept.append((start, batch_idx, on_host(output, source.fresh_memory)))
            del output  # not held while the next step computes
        position.leave(before)
        position.indices = None
        if self._pacing is not None:
            self._pacing.before += came - first
        self._lengths.note(name, source.length, came, over=limit is None or came < limit)
        return kept if self._strategy.is_data_leader else []

    @property
    def _together(self) -> bool:
        """Whether a forward needs every rank, also one that has nothing to predict."""
        return self._strategy.collective_forward

    def _first(self, index: int, source: BatchSource, limit: int | None) -> int:
        """Return the micro-batch to begin with: what is there before it is not even read, where that can be told."""
        first, shards, indices = 0, source.shards(0), source.indices(0)
        if shards is not None and indices is not None:
            for shard, ours in islice(zip(shards, indices, strict=False), limit):
                if not shard.joins and not self._is_there(ours, first, index):
                    break
                first += 1
        return min(self._strategy.control.gather_objects(first)) if self._together else first

    def _is_there(self, indices: Sequence[Any] | None, batch_idx: int, index: int) -> bool:
        return all(there(indices, batch_idx, index) for there in self._there)

    def _all_there(self, is_there: bool) -> bool:
        """Whether no rank has anything to predict. Collective."""
        return not self._strategy.control.all_reduce_async(torch.tensor([float(not is_there)])).wait().item()


def _merged(by_rank: list[list[tuple[int, int, Any]]]) -> list[Any]:
    """Put all ranks' outputs in the order of the data set; where that is unknown, by micro-batch and then rank."""
    if len(by_rank) == 1:
        return [output for _, _, output in by_rank[0]]
    everything = [
        (start, batch_idx, rank, output) for rank, part in enumerate(by_rank) for start, batch_idx, output in part
    ]
    everything.sort(key=lambda item: item[:3])
    return [output for *_, output in everything]
