"""Training with an optimizer that evaluates the loss anew within its step, as LBFGS does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import is_torchs
from drivetrain._loops.step import AutomaticStep
from drivetrain._loops.uneven_inputs import Muted
from drivetrain._loops.windows import MicroBatch
from drivetrain._loops.zero_grad import zero_grad
from drivetrain.data._batch_copies import copy_batch, copy_containers


class ClosureStep(AutomaticStep):
    """Hands the optimizer a closure over the whole window, on all ranks.

    Its gradients are there before the optimizer steps, as those who go elsewhere before they ask expect it (SAM). Asked
    where the window's micro-batches were computed, the closure returns what they gave; elsewhere it runs them again.
    It returns the loss of all ranks together: line search and stopping rules that went by a local loss would decide
    differently on each rank, and the replicas would part.

    Args:
        args: see `AutomaticStep`.
        fresh_memory: a batch stays as it is while later ones are read.
    """

    def __init__(self, *args: Any, fresh_memory: bool) -> None:
        super().__init__(*args)
        self._lasting = fresh_memory
        self._window: list[tuple[MicroBatch, int]] = []
        self._window_loss: torch.Tensor | None = None

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        if micro.opens:
            self._window = []
            self._window_loss = None
        # It is run again: after `training_step`, which may take it apart, and after the loader has gone on, which may
        # write the next one into the same memory.
        own = copy_containers if micro.closes or self._lasting else copy_batch
        kept = micro.with_batch(own(micro.batch))
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
        if self._clip is not None:
            self._clip(self.optimizers)
        standing = None if is_torchs(optimizer) else Standing(optimizer)
        asked = False

        def closure() -> torch.Tensor:
            nonlocal asked
            if asked or (standing is not None and self._anywhere(standing.has_moved())):
                self._evaluate()
                if self._skipped:
                    self._rescale(window_weight)
                if self._clip is not None:
                    self._clip(self.optimizers)
            asked = True
            loss = self._window_loss
            if self.strategy.world_size > 1:
                # A rank that only joins does not know in which dtype the others computed theirs.
                loss = torch.zeros((), device=self.strategy.device) if loss is None else loss
                loss = loss.to(self.strategy.device, torch.float64)
            assert loss is not None
            # As its gradients are, the loss is the mean over what contributed.
            return self.strategy.reduce(loss if part == 1.0 else loss / part, "mean")

        if self._step_optimizers is not None:
            return self._step_optimizers(self._loss, closure)
        return self.strategy.optimizer_step(optimizer, closure)

    def _anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank: where parameters are sharded, this one's part may not tell."""
        if self.strategy.world_size == 1:
            return here
        return bool(self.strategy.reduce(torch.tensor(float(here), device=self.strategy.device), "max") > 0)

    def drop_window(self) -> None:
        super().drop_window()
        self._window = []

    def _evaluate(self) -> None:
        """Run the window again at the optimizer's current point; nothing is logged twice."""
        (optimizer,) = self.optimizers
        zero_grad(optimizer)
        window, self._window_loss = self._window, None
        muted = Muted(self._metrics)
        self._metrics.joining = False  # it differs between the window's micro-batches: each says so for itself
        try:
            with torch.enable_grad():
                for micro, batch_idx in window:
                    super().micro_batch(replace(micro, opens=False, batch=copy_containers(micro.batch)), batch_idx)
        finally:
            muted.end()


class Standing:
    """Where an optimizer's parameters and gradients are, to tell whether it has moved since.

    Optimizers that want a closure come in two kinds: some ask for it where they stand, others take the gradients that
    are there, go elsewhere and ask for it then. Nothing but where they are when they ask tells them apart.
    """

    __slots__ = ("_marks", "_optimizer", "_sizes")

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._marks = self._marked()
        self._sizes = self._sized()

    def has_moved(self) -> bool:
        """Whether anything changed, be it through ``.data``. Waits for the device where nothing did."""
        if self._marks != self._marked():
            return True
        sizes = self._sized()
        if self._sizes is None or sizes is None:
            return True
        return any(not torch.equal(now, then) for now, then in zip(sizes, self._sizes, strict=True))

    def _held(self) -> Iterator[Tensor | None]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield parameter.grad

    def _marked(self) -> list[tuple[int, int]]:
        return [(id(one), -1 if one is None else one._version) for one in self._held()]

    @torch.no_grad()
    def _sized(self) -> list[Tensor] | None:
        """The norms of all tensors; None where they cannot be had in double precision, which tells small steps."""
        tensors: list[Any] = [one.detach() for one in self._held() if one is not None]
        # The attribute and not the class: importing DTensor takes long, and without it there is none.
        local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
        if any(one.is_sparse or one.is_complex() or one.device.type == "mps" for one in local):
            return None
        return list(torch._foreach_norm(local, 2, dtype=torch.float64)) if local else []
