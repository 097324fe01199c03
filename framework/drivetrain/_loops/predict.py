"""The prediction loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from drivetrain._data.batch_source import BatchSource
from drivetrain._loops.evaluate import LoaderLoop
from drivetrain._loops.outputs import exchange, on_host

IsPredicted = Callable[[int, int], bool]
"""``is_predicted(batch_idx, dataloader_idx)``: whether an earlier run has written a batch's predictions."""


@dataclass(eq=False)
class PredictLoop(LoaderLoop):
    """Runs ``predict_step``, and gathers the outputs.

    Attributes:
        keeps_outputs: whether the outputs are kept and returned.
        get_predicted_checks: called once, if outputs are not kept; returns functions that check whether an earlier run
            has predicted a batch. A batch is skipped if all of these functions return True. Without an earlier run, the
            sequence is empty.
    """

    keeps_outputs: bool
    get_predicted_checks: Callable[[], Sequence[IsPredicted]]
    _predicted_checks: Sequence[IsPredicted] = field(default=(), init=False)

    def run(self) -> list[Any] | None:
        """Run prediction; return the outputs of all micro-batches in data set order, on every rank.

        Returns:
            A list of outputs, or with several loaders one such list per loader; None if outputs are not kept, or if the
            ranks exit before the end.
        """
        hooks, local_outputs = self.hooks, []
        if self.early_exit is not None and self.early_exit.exits_immediately("prediction"):
            return None
        with self._evaluating():
            self.metrics.enter("predict")
            for hook in (*hooks.on_predict_start, *hooks.on_predict_epoch_start):
                hook()
            self._predicted_checks = () if self.keeps_outputs else self.get_predicted_checks()
            for index, source, limit in self._loaders():
                local_outputs.append(self._predict(index, source, limit))
                if self._has_exited:
                    return None
            for hook in (*hooks.on_predict_epoch_end, *hooks.on_predict_end):
                hook()
        self.metrics.enter(None)
        (ranks,) = self.strategy.control.count_flags("the end of prediction", self.log.lengths.has_mismatch)
        self.log.lengths.warn_together(ranks)
        if not self.keeps_outputs:
            return None
        merged = [_merge(exchange(loader_outputs, self.strategy.control)) for loader_outputs in local_outputs]
        return merged[0] if len(merged) == 1 else merged

    def _predict(self, index: int, source: BatchSource, limit: int | None) -> list[tuple[int, int, Any]]:
        """Run prediction on one loader; return ``(start, batch_idx, output)`` for each output that is kept."""
        collective, checks = self.strategy.collective_forward, bool(self._predicted_checks)
        kept: list[tuple[int, int, Any]] = []
        first = self._first_to_predict(index, source, limit) if checks else 0
        indices_of_batches = source.requested_indices()
        equal_counts = source.shares_known and not checks
        for batch_idx, batch, share in self._batches(index, source, limit, first=first, equal_counts=equal_counts):
            indices = None if indices_of_batches is None else next(indices_of_batches, None)
            self.current.indices = None if share.joins else indices
            predicted = checks and (share.joins or self._is_predicted(batch_idx, index))
            done = collective and checks and self._is_predicted_on_all_ranks(predicted)
            if share.joins or predicted:
                if collective and not done:
                    self._join(batch, batch_idx, index)
                continue
            output = self._run_step(batch, batch_idx, index, share.samples)
            if self.keeps_outputs:
                start = share.start if source.shares_known else batch_idx
                # If the loader reuses the memory of batches, an output on the host may have to be copied.
                kept.append((start, batch_idx, on_host(output, source.fresh_memory)))
            del output  # frees the output's memory before the next step
        self.current.indices = None
        return kept if self.strategy.is_data_leader else []

    def _first_to_predict(self, index: int, source: BatchSource, limit: int | None) -> int:
        """Return the number of the first micro-batch to predict; 0 if it is known only from reading. Reads no data."""
        first = 0
        for share in islice(source.shares(0) or (), limit):
            if not share.joins and not self._is_predicted(first, index):
                break
            first += 1
        return min(self.strategy.control.gather_objects(first)) if self.strategy.collective_forward else first

    def _is_predicted(self, batch_idx: int, index: int) -> bool:
        return all(is_predicted(batch_idx, index) for is_predicted in self._predicted_checks)

    def _is_predicted_on_all_ranks(self, predicted: bool) -> bool:
        """Return whether no rank still has to predict this batch. Collective."""
        return not self.strategy.control.all_reduce_async(torch.tensor([float(not predicted)]))().item()


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
