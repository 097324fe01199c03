"""The prediction loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch

from drivetrain._data.batch_source import BatchSource
from drivetrain._loops.evaluate import LoaderLoop
from drivetrain._loops.evaluation_batches import evaluation_batches

IsPredicted = Callable[[int, int], bool]
"""``is_predicted(batch_idx, dataloader_idx)``: whether an earlier run has written a batch's predictions."""


class PredictLoop(LoaderLoop):
    """Runs ``predict_step``, and gathers the outputs."""

    _keeps_outputs = False
    _predicted_checks: Sequence[IsPredicted] = ()

    def run(self, keeps_outputs: bool, get_predicted_checks: Callable[[], Sequence[IsPredicted]]) -> list[Any] | None:
        """Run prediction; return the outputs of all micro-batches in data set order, on every rank.

        Args:
            keeps_outputs: whether the outputs are kept and returned.
            get_predicted_checks: called once, if outputs are not kept; returns functions that check whether an earlier
                run has predicted a batch. A batch is skipped if all of these functions return True. Without an earlier
                run, the sequence is empty.

        Returns:
            A list of outputs, or with several loaders one such list per loader; None if outputs are not kept, or if the
            ranks exit before the end.
        """
        hooks, early_exit, lengths, local_outputs = self._hooks, self._mode.early_exit, self._reporting.lengths, []
        self._keeps_outputs = keeps_outputs
        if early_exit is not None and early_exit.exits_immediately("prediction"):
            return None
        with self._evaluating():
            self._metrics.enter("predict")
            for hook in (*hooks.on_predict_start, *hooks.on_predict_epoch_start):
                hook()
            self._predicted_checks = () if keeps_outputs else get_predicted_checks()
            for index, (source, limit) in enumerate(zip(self._data.sources, self._data.limits(), strict=True)):
                outputs = self._predict(index, source, limit)
                if outputs is None:
                    return None
                local_outputs.append(outputs)
            for hook in (*hooks.on_predict_epoch_end, *hooks.on_predict_end):
                hook()
        self._metrics.enter(None)
        (ranks_with_mismatch,) = self._strategy.control.count_flags("the end of prediction", lengths.has_mismatch)
        lengths.warn_together(ranks_with_mismatch)
        if not keeps_outputs:
            return None
        from drivetrain._loops.outputs import exchange

        merged = [_merge(exchange(loader_outputs, self._strategy.control)) for loader_outputs in local_outputs]
        return merged[0] if len(merged) == 1 else merged

    def _predict(self, index: int, source: BatchSource, limit: int | None) -> list[tuple[int, int, Any]] | None:
        """Run prediction on one loader.

        Returns:
            ``(start, batch_idx, output)`` for each output that is kept; None if the ranks exit before the end.
        """
        from drivetrain._loops.outputs import on_host

        early_exit, reporter, move = self._mode.early_exit, self._reporting.progress_reporter, self._data.move
        name, kept, position = self._title("prediction", index), [], self._position
        previous = position.enter("prediction")
        count = first = self._first_to_predict(index, source, limit) if self._predicted_checks else 0
        indices_of_batches = source.requested_indices()
        batches = evaluation_batches(source, self._strategy, name, limit, first)
        for batch_idx, (host_batch, shard) in enumerate(batches, first):
            position.batch_idx = batch_idx
            if reporter is not None and batch_idx > first and (batch_idx - first) % reporter.every == 0:
                reporter.report(batch_idx)
            indices = None if indices_of_batches is None else next(indices_of_batches, None)
            position.indices = None if shard.joins else indices
            # A rank without data repeats its last batch, with start < 0, to join collectives. This does not count.
            count += not shard.joins or shard.start >= 0
            predicted = bool(self._predicted_checks) and (shard.joins or self._is_predicted(batch_idx, index))
            done = self._collective and self._predicted_checks and self._is_predicted_on_all_ranks(predicted)
            if shard.joins or predicted:
                if self._collective and not done:
                    self._join(host_batch, batch_idx, index)
            else:
                batch = host_batch if move is None else move(host_batch, index)
                hook_arguments = (batch, batch_idx, index) if self._several else (batch, batch_idx)
                for hook in self._batch_start:
                    hook(*hook_arguments)
                output = self._runner(self._step, *self._arguments(batch, batch_idx, index))
                for hook in self._batch_end:
                    hook(output, *hook_arguments)
                if self._keeps_outputs:
                    start = shard.start if source.shards_known else batch_idx
                    # If the loader reuses the memory of batches, an output on the host may have to be copied.
                    kept.append((start, batch_idx, on_host(output, source.fresh_memory)))
                del output  # frees the output's memory before the next step
            if early_exit is not None and early_exit.stop.counts_points and early_exit.exits():
                break
        position.leave(previous)
        position.indices = None
        if early_exit is not None and early_exit.has_exited(source.shards_known and not self._predicted_checks):
            return None
        if reporter is not None:
            reporter.before += count
        self._reporting.lengths.note(name, source.length, count, ended=limit is None or count < limit)
        return kept if self._strategy.is_data_leader else []

    @property
    def _collective(self) -> bool:
        """Whether a forward needs every rank, including ranks that have nothing to predict."""
        return self._strategy.collective_forward

    def _first_to_predict(self, index: int, source: BatchSource, limit: int | None) -> int:
        """Return the number of the first micro-batch to predict; 0 if it is known only from reading. Reads no data."""
        first = 0
        for shard in islice(source.shards(0) or (), limit):
            if not shard.joins and not self._is_predicted(first, index):
                break
            first += 1
        return min(self._strategy.control.gather_objects(first)) if self._collective else first

    def _is_predicted(self, batch_idx: int, index: int) -> bool:
        return all(is_predicted(batch_idx, index) for is_predicted in self._predicted_checks)

    def _is_predicted_on_all_ranks(self, predicted: bool) -> bool:
        """Return whether no rank still has to predict this batch. Collective."""
        return not self._strategy.control.all_reduce_async(torch.tensor([float(not predicted)])).wait().item()


def _merge(by_rank: list[list[tuple[int, int, Any]]]) -> list[Any]:
    """Sort all ranks' outputs by position in the data set; if the position is unknown, by micro-batch and then rank."""
    if len(by_rank) == 1:
        return [output for _, _, output in by_rank[0]]
    outputs = [
        (start, batch_idx, rank, output)
        for rank, rank_outputs in enumerate(by_rank)
        for start, batch_idx, output in rank_outputs
    ]
    outputs.sort(key=lambda item: item[:3])
    return [output for *_, output in outputs]
