"""OptimizerHandle: an optimizer as user code steps it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import evaluates_once, explain_missing_closure
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.step import refuse_step
from drivetrain._loops.step_calls import suspends_forward
from drivetrain.strategies.strategy import Strategy


class OptimizerHandle:
    """An optimizer as ``self.optimizers()`` returns it: its ``step`` goes through the strategy and the precision.

    Every attribute that the handle does not have is read from the optimizer.

    Args:
        optimizer: the optimizer.
        strategy: the strategy that steps it.
        hooks: the overridden hooks.
        automatic: whether the engine steps the optimizer and calls the hooks (automatic optimization). Only the
            module's ``optimizer_step`` then may step it.
        closure: whether the engine passes the optimizer a closure.
    """

    def __init__(
        self, optimizer: Optimizer, strategy: Strategy, hooks: HookTable, *, automatic: bool, closure: bool
    ) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self.step_optimizer: Callable[..., bool] = strategy.optimizer_step
        self._weights_changed = strategy.precision.weights_changed
        self._before_step = () if automatic else hooks.on_before_optimizer_step
        # A closure that is not passed on is called once, before the step.
        self._passes_closure = closure if automatic else not evaluates_once(optimizer)
        self._suspends_forward = not automatic and suspends_forward(strategy)
        self.may_step = not automatic
        """Whether `step` may be called."""
        self.share = 1.0
        """The factor of this rank's loss in the mean over ranks; 0 while the rank joins without data."""
        self.stepped: bool | None = None
        """Whether the last call of `step` updated the weights; None before the first call."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer; return the loss of the closure's first evaluation, or None without a closure.

        The optimizer may call the closure any number of times. The closure that the optimizer gets returns the mean
        loss of all ranks. Torch's own optimizers, except LBFGS, would call the closure once before they step. For
        these optimizers, this method calls the closure instead.

        Raises:
            ConfigurationError: the optimizer needs a closure and got none.
        """
        if not self.may_step:
            refuse_step(self.optimizer)
        if closure is not None and self._passes_closure:
            return self._step_with(closure)
        loss = None if closure is None else closure()
        if self._before_step:
            self._strategy.unscale(self.optimizer)
            for hook in self._before_step:
                hook(self.optimizer)
        try:
            if self._suspends_forward:
                with self._strategy.precision.outside_forward():
                    self.stepped = self.step_optimizer(self.optimizer)
            else:
                self.stepped = self.step_optimizer(self.optimizer)
        except Exception as error:
            explain_missing_closure(error, self.optimizer)
            raise
        self._weights_changed()
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        losses: list[Any] = []
        precision = self._strategy.precision

        def evaluate() -> Any:
            self._weights_changed()
            with precision.forward_context() if self._suspends_forward else nullcontext():
                loss = closure()
            if loss is not None and self._strategy.world_size > 1:  # line search has to decide the same on every rank
                loss = self._strategy.reduce(torch.as_tensor(loss).detach() * self.share, "mean")
            if not losses:
                for hook in self._before_step:
                    hook(self.optimizer)
            losses.append(loss)
            return loss

        with precision.outside_forward() if self._suspends_forward else nullcontext():
            self.stepped = self.step_optimizer(self.optimizer, evaluate)
        self._weights_changed()
        return losses[0] if losses else None

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # copy and pickle read attributes before they are set
            raise AttributeError(name)
        return getattr(self.optimizer, name)
