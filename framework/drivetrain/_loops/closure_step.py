"""The training step for an optimizer that evaluates the loss again within its step, as L-BFGS does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._data.batch_copies import copy_batch, copy_containers
from drivetrain._loops.configured_optimizers import is_torch_optimizer
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.step import AutomaticStep, OptimizerStep
from drivetrain._loops.step_arguments import StepArguments, WrappedModule
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.uneven_inputs import LoggingPaused
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore


class ClosureStep(AutomaticStep):
    """Passes the optimizer a closure that evaluates the whole window on all ranks.

    The window's gradients are computed before the optimizer steps, since some optimizers (SAM) use the gradients and
    move the parameters before they call the closure. If the parameters have not moved, the closure returns the loss
    that was computed. Otherwise the closure runs the window again. The closure returns the mean loss of all ranks,
    because with a local loss, line search and stopping rules would decide differently on each rank, and the replicas
    would diverge.

    Args:
        wrapped: as for `AutomaticStep`.
        hooks: as for `AutomaticStep`.
        metrics: as for `AutomaticStep`.
        trainables: as for `AutomaticStep`.
        step: as for `AutomaticStep`, with a single optimizer.
        arguments: as for `AutomaticStep`.
        keeps_batches: whether a batch stays unchanged while the loader reads later ones.
    """

    def __init__(
        self,
        wrapped: WrappedModule,
        hooks: HookTable,
        metrics: MetricStore,
        trainables: Trainables,
        step: OptimizerStep,
        arguments: StepArguments | None,
        *,
        keeps_batches: bool,
    ) -> None:
        super().__init__(wrapped, hooks, metrics, trainables, step, arguments)
        self._keeps_batches = keeps_batches
        self._window: list[tuple[MicroBatch, int]] = []
        self._window_loss: torch.Tensor | None = None

    def zero_grad(self) -> None:
        self._window, self._window_loss = [], None
        super().zero_grad()

    def forward_backward(self, micro_batch: MicroBatch, batch_idx: int, in_context: bool = False) -> Any:
        # The closure may run the micro-batch again after `training_step` has modified the batch, or after the loader
        # has written the next batch into the same memory.
        copy = copy_containers if micro_batch.closes or self._keeps_batches else copy_batch
        self._window.append((micro_batch.with_batch(copy(micro_batch.batch)), batch_idx))
        return self._run(micro_batch, batch_idx)

    def _run(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        """Run forward and backward, and add the micro-batch's loss to the window's loss."""
        output = super().forward_backward(micro_batch, batch_idx)
        if output is not None and micro_batch.weight:
            assert self._loss is not None
            scaled = self._loss.detach() * micro_batch.scale
            self._window_loss = scaled if self._window_loss is None else self._window_loss + scaled
        return output

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        window_weight = micro_batch.window_weight
        contributed_share = 1.0 if not window_weight else 1.0 - self._skipped / window_weight
        if (self._skipped or not window_weight) and not self._rescale(window_weight):
            return False
        if self._tracks_trainables:
            self._close_trainables()
        (optimizer,) = self.optimizers
        for hook in self._before_step:
            hook(optimizer)
        if self._clip is not None:
            self._clip(self.optimizers)
        snapshot = None if is_torch_optimizer(optimizer) else ParameterSnapshot(optimizer)
        called = False

        def closure() -> torch.Tensor:
            nonlocal called
            if called or (snapshot is not None and self._on_any_rank(snapshot.has_moved())):
                self._evaluate_again()
                if self._skipped:
                    self._rescale(window_weight)
                if self._clip is not None:
                    self._clip(self.optimizers)
            called = True
            loss = self._window_loss
            if self.strategy.world_size > 1:
                # A joining rank does not know the dtype of the other ranks' losses.
                loss = torch.zeros((), device=self.strategy.device) if loss is None else loss
                loss = loss.to(self.strategy.device, torch.float64)
            assert loss is not None
            # Like the gradients, the loss is normalized by the weights of the micro-batches that had a loss.
            return self.strategy.reduce(loss if contributed_share == 1.0 else loss / contributed_share, "mean")

        if self._override is not None:
            return self._override(self._loss, closure)
        return self.strategy.optimizer_step(optimizer, closure)

    def _on_any_rank(self, moved: bool) -> bool:
        """Return whether ``moved`` is true on any rank. Some ranks may hold only shards that did not change."""
        if self.strategy.world_size == 1:
            return moved
        return bool(self.strategy.reduce(torch.tensor(float(moved), device=self.strategy.device), "max") > 0)

    def drop_window(self) -> None:
        super().drop_window()
        self._window = []

    def _evaluate_again(self) -> None:
        """Run the window with the current values of the parameters, without logging."""
        (optimizer,) = self.optimizers
        self._zero_grad(optimizer)
        window, self._window_loss = self._window, None
        paused = LoggingPaused(self._metrics)
        self._metrics.joining = False  # a micro-batch that this rank joins sets the flag again
        try:
            with torch.enable_grad():
                for micro_batch, batch_idx in window:
                    self._run(replace(micro_batch, batch=copy_containers(micro_batch.batch)), batch_idx)
        finally:
            paused.end()


class ParameterSnapshot:
    """Detects whether an optimizer has changed its parameters or gradients since this object was created.

    Some optimizers call the closure before they change anything. Other optimizers use the gradients and move the
    parameters before they call the closure. Only a comparison of the tensors shows what an optimizer does.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._versions = self._current_versions()
        self._norms = self._current_norms()

    def has_moved(self) -> bool:
        """Return whether a tensor changed, including through ``.data``. Waits for the device if no version changed."""
        if self._versions != self._current_versions():
            return True
        norms = self._current_norms()
        if self._norms is None or norms is None:
            return True
        return any(not torch.equal(now, before) for now, before in zip(norms, self._norms, strict=True))

    def _tensors(self) -> Iterator[Tensor | None]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield parameter.grad

    def _current_versions(self) -> list[tuple[int, int]]:
        return [(id(tensor), -1 if tensor is None else tensor._version) for tensor in self._tensors()]

    @torch.no_grad()
    def _current_norms(self) -> list[Tensor] | None:
        """Return the tensors' norms in float64, which shows small steps; None if a tensor has no such norm."""
        tensors: list[Any] = [tensor.detach() for tensor in self._tensors() if tensor is not None]
        # A DTensor is recognized by its attribute rather than by its class, since importing the class is slow.
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
        if any(tensor.is_sparse or tensor.is_complex() or tensor.device.type == "mps" for tensor in local):
            return None
        return list(torch._foreach_norm(local, 2, dtype=torch.float64)) if local else []
