"""Training with an optimizer that evaluates the loss anew within its step, as LBFGS does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from drivetrain.data.keeping import own_memory
from drivetrain.loops.step import AutomaticStep
from drivetrain.loops.windows import MicroBatch
from drivetrain.loops.zero_grad import zero_grad


class ClosureStep(AutomaticStep):
    """Hands the optimizer a closure over the whole window, on all ranks.

    The closure's first call returns what the window's micro-batches already computed; each further one runs them again.
    It returns the loss of all ranks together: line search and stopping rules that went by a local loss would decide
    differently on each rank, and the replicas would part.

    Args:
        args: see `AutomaticStep`.
        lasting: a batch stays as it is while later ones are read.
    """

    def __init__(self, *args: Any, lasting: bool) -> None:
        super().__init__(*args)
        self._lasting = lasting
        self._window: list[tuple[MicroBatch, int]] = []
        self._window_loss: torch.Tensor | None = None

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        if micro.opens:
            self._window = []
            self._window_loss = None
        # It is run again after the loader has gone on, which may write the next one into the same memory.
        kept = micro if micro.closes or self._lasting else micro.with_batch(own_memory(micro.batch))
        self._window.append((kept, batch_idx))
        return super().micro_batch(micro, batch_idx)

    def forward_backward(self, micro: MicroBatch, batch_idx: int) -> Any:
        output = super().forward_backward(micro, batch_idx)
        if output is not None and micro.weight:
            assert self._loss is not None
            part = self._loss.detach() * micro.scale
            self._window_loss = part if self._window_loss is None else self._window_loss + part
        return output

    def close_window(self, micro: MicroBatch) -> bool:
        window_weight = micro.window_weight
        part = 1.0 if not window_weight else 1.0 - self._skipped / window_weight
        if (self._skipped or not window_weight) and not self._rescale(window_weight):
            return False
        if self._watches:
            self._close()
        (optimizer,) = self.optimizers
        for hook in self._before_step:
            hook(optimizer)
        evaluated = True

        def closure() -> torch.Tensor:
            nonlocal evaluated
            if not evaluated:
                self._evaluate()
                if self._skipped:
                    self._rescale(window_weight)
            evaluated = False
            if self._clip is not None:
                self._clip(self.optimizers)
            loss = self._window_loss
            if loss is None:  # a rank that only joins
                loss = torch.zeros((), device=self.strategy.device)
            # As its gradients are, the loss is the mean over what contributed.
            return self.strategy.reduce(loss if part == 1.0 else loss / part, "mean")

        if self._step_optimizers is not None:
            return self._step_optimizers(self._loss, closure)
        return self.strategy.optimizer_step(optimizer, closure)

    def drop_window(self) -> None:
        super().drop_window()
        self._window = []

    def _evaluate(self) -> None:
        """Run the window again at the optimizer's current point; nothing is logged twice."""
        (optimizer,) = self.optimizers
        zero_grad(optimizer)
        window, self._window_loss = self._window, None
        metrics = self._metrics
        # Whether this rank joins differs between the window's micro-batches: each says so for itself.
        before, metrics.muted, metrics.joining = (metrics.muted, metrics.joining), True, False
        try:
            with torch.enable_grad():
                for micro, batch_idx in window:
                    super().micro_batch(replace(micro, opens=False), batch_idx)
        finally:
            metrics.muted, metrics.joining = before
