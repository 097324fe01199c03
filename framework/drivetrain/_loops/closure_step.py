"""The training step for an optimizer that evaluates the loss again within its step, as L-BFGS does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._data.batch_copies import copy_batch, copy_containers
from drivetrain._loops.configured_optimizers import is_torch_optimizer
from drivetrain._loops.step import AutomaticStep, RunMicroBatch
from drivetrain._loops.uneven_inputs import LoggingPaused
from drivetrain._loops.windows import MicroBatch


@dataclass(eq=False)
class ClosureStep(AutomaticStep):
    """Passes the optimizer, of which there is one, a closure that evaluates the whole window on all ranks.

    The window's gradients are computed before the optimizer steps, since some optimizers (SAM) use the gradients and
    move the parameters before they call the closure. If the parameters have not moved, the closure returns the loss
    that was computed. Otherwise the closure runs the window again. The closure returns the mean loss of all ranks,
    because with a local loss, line search and stopping rules would decide differently on each rank, and the replicas
    would diverge.

    Attributes:
        keeps_batches: whether a batch stays unchanged while the loader reads later ones.
    """

    keeps_batches: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_stepped_by_module = self._step_together is not None
        self._step_together = self._step_with_closure
        self.forward_backward = self._keeping(self.forward_backward)
        self.run_weightless = self._keeping(self.run_weightless)
        self._window: list[tuple[MicroBatch, int, RunMicroBatch]] = []
        self._window_loss: Tensor | None = None

    def zero_grad(self) -> None:
        self._window, self._window_loss = [], None
        super().zero_grad()

    def _keeping(self, run: RunMicroBatch) -> RunMicroBatch:
        """Return a function that runs a micro-batch by ``run``, and keeps the batch for the closure."""

        def keep_and_run(micro_batch: MicroBatch, batch_idx: int) -> Any:
            # The closure may run the micro-batch again after `training_step` has modified the batch, or after the
            # loader has written the next batch into the same memory.
            copy = copy_containers if micro_batch.closes or self.keeps_batches else copy_batch
            self._window.append((micro_batch.with_batch(copy(micro_batch.batch)), batch_idx, run))
            return run(micro_batch, batch_idx)

        return keep_and_run

    def _run(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        """Run forward and backward, and add the micro-batch's loss to the window's loss."""
        output = super()._run(micro_batch, batch_idx)
        if output is not None and micro_batch.weight:
            assert self.last_loss is not None
            scaled = self.last_loss.detach() * micro_batch.scale
            self._window_loss = scaled if self._window_loss is None else self._window_loss + scaled
        return output

    def _rescale(self, window_weight: float) -> bool:
        """Normalize the loss, like the gradients, by the weights of the micro-batches that had a loss."""
        contributed = window_weight - self._skipped
        rescaled = super()._rescale(window_weight)
        if rescaled and self._window_loss is not None:
            self._window_loss = self._window_loss * (window_weight / contributed)
        return rescaled

    def _step_with_closure(self) -> bool:
        (optimizer,) = self.optimizers
        snapshot = None if is_torch_optimizer(optimizer) else ParameterSnapshot(optimizer)
        called = False

        def closure() -> Tensor:
            nonlocal called
            if called or (snapshot is not None and self._on_any_rank(snapshot.has_moved())):
                self._evaluate_again()
            called = True
            loss = self._window_loss
            if self.strategy.world_size > 1:
                # A joining rank does not know the dtype of the other ranks' losses.
                loss = torch.zeros((), device=self.strategy.device) if loss is None else loss
                loss = loss.to(self.strategy.device, torch.float64)
            assert loss is not None
            return self.strategy.reduce(loss, "mean")

        if self._is_stepped_by_module:
            return self._step_by_module(closure)
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
        self.module.optimizer_zero_grad(self.progress.epoch, self.progress.batch_idx, optimizer)
        self._window_loss = None
        paused = LoggingPaused(self.metrics)
        self.metrics.joining = False  # a micro-batch that this rank joins sets the flag again
        try:
            with torch.enable_grad():
                for micro_batch, batch_idx, run in self._window:
                    run(replace(micro_batch, batch=copy_containers(micro_batch.batch)), batch_idx)
        finally:
            paused.end()
        if self._skipped:
            self._rescale(self._window[-1][0].window_weight)
        if self.clip is not None:
            self.clip(self.optimizers)


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
