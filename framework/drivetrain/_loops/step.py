"""What happens to a micro-batch, and to the window that it closes."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import explain_missing_closure
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.step_arguments import StepArguments
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.uneven_inputs import leaving_no_trace
from drivetrain._loops.windows import MicroBatch
from drivetrain._loops.zero_grad import zero_grad
from drivetrain._metrics import MetricStore
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies._trainable import REQUIRES_GRAD
from drivetrain.strategies.strategy import StepRunner, Strategy

logger = logging.getLogger("drivetrain")

ClipGradients = Callable[[Sequence[Optimizer]], Any]
StepOptimizers = Callable[..., bool]
"""Takes the last loss and, where the optimizer needs one, a closure; tells whether a step was made."""


class TrainStep(Protocol):
    """One way of training: automatic, with closures, or manual."""

    @property
    def last_loss(self) -> Tensor | None:
        """The loss of the last micro-batch, of shape (); None where the engine does not see it."""

    @property
    def never_steps(self) -> bool:
        """Whether this is left to ``training_step``, which has not done it yet."""

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        """Train on one micro-batch; return what ``training_step`` returned."""

    def close_window(self, micro: MicroBatch) -> bool:
        """Step after a window's last micro-batch; False where no step was made."""

    def drop_window(self) -> None:
        """Forget an open window and its gradients."""


class AutomaticStep:
    """Forward, backward, and after a window's last micro-batch the optimizers' step.

    Args:
        module: whose ``training_step`` is run.
        runner: the strategy's callable that every step runs through.
        strategy: where.
        optimizers: stepped together.
        hooks: who overrode what.
        metrics: where values are logged.
        trainables: watches what trains.
        clip: clips before a step; None where nothing is clipped.
        step_optimizers: steps them where the module overrides ``optimizer_step``; None for the plain way.
        unscales: whether scaled gradients are unscaled before anything else is done; else ``clip`` does it.
    """

    def __init__(
        self,
        module: TrainModule,
        runner: StepRunner,
        strategy: Strategy,
        optimizers: Sequence[Optimizer],
        hooks: HookTable,
        metrics: MetricStore,
        trainables: Trainables,
        clip: ClipGradients | None,
        arguments: StepArguments | None,
        step_optimizers: StepOptimizers | None = None,
        unscales: bool = False,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self.optimizers = tuple(optimizers)
        self._training_step = called_by(runner, module.training_step, arguments)
        self._metrics = metrics
        self._trainables = trainables
        self._watches = trainables.watches
        self._clip = clip
        self._step_optimizers = step_optimizers
        self._before_zero_grad = hooks.on_before_zero_grad
        self._before_backward = hooks.on_before_backward
        self._after_backward = hooks.on_after_backward
        self._before_step = hooks.on_before_optimizer_step
        self._scales_loss = strategy.precision.scales_loss
        self._unscales = unscales
        self._backward = backward_of(strategy)
        self._defers_sync = is_overridden("gradient_sync", strategy, Strategy)
        self._enters_sync = enters_sync(strategy)
        self._step_optimizer = step_of(strategy)
        self._none_allowed = strategy.world_size == 1 and strategy.accepts_none_loss
        self._skipped = 0.0
        self._loss: Tensor | None = None
        self._warned = False

    never_steps = False

    def wrap(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around backward and clipping, before the first step.

        Args:
            around: takes "backward" or "clipping", and what does it.
        """
        self._backward = around("backward", self._backward or operator.methodcaller("backward"))
        self._clip = None if self._clip is None else around("clipping", self._clip)

    @property
    def last_loss(self) -> Tensor | None:
        return self._loss

    # The hot path

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        if micro.opens:
            for hook in self._before_zero_grad:
                for optimizer in self.optimizers:
                    hook(optimizer)
            for optimizer in self.optimizers:
                zero_grad(optimizer)  # before the forward, through which old gradients need not live
            if self._watches:
                watch = self._trainables
                if watch.touched or tuple(map(REQUIRES_GRAD, watch.parameters)) != watch.flags:
                    watch.settle()
                watch.open = True
        if micro.weight == 0:
            return self._weightless(micro, batch_idx)
        if not self._defers_sync or (micro.closes and not self._enters_sync):
            return self.forward_backward(micro, batch_idx)
        with self.strategy.gradient_sync(micro.closes):
            return self.forward_backward(micro, batch_idx)

    def forward_backward(self, micro: MicroBatch, batch_idx: int) -> Any:
        """Run one micro-batch forward and backward, its loss scaled to its part of the window."""
        output = self._training_step(micro.batch, batch_idx)
        if self._watches:
            watch = self._trainables
            if watch.touched or tuple(map(REQUIRES_GRAD, watch.parameters)) != watch.flags:
                watch.refuse_within()
        loss = output["loss"] if isinstance(output, dict) and "loss" in output else output
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            if loss is None and self._none_allowed:
                self._skipped += micro.weight
                return None
            self._refuse(loss, batch_idx)
        for hook in self._before_backward:
            hook(loss)
        self._loss = loss
        scaled = loss if micro.scale == 1.0 else loss * micro.scale
        if self._backward is None:
            scaled.backward()
        else:
            self._backward(scaled)
        for hook in self._after_backward:
            hook()
        return output

    def close_window(self, micro: MicroBatch) -> bool:
        if (self._skipped or not micro.window_weight) and not self._rescale(micro.window_weight):
            return False
        if self._watches:
            self._close()
        strategy = self.strategy
        if self._unscales:
            for optimizer in self.optimizers:
                strategy.unscale(optimizer)
        for hook in self._before_step:
            for optimizer in self.optimizers:
                hook(optimizer)
        if self._clip is not None:
            self._clip(self.optimizers)
        stepped = True
        if self._step_optimizers is not None:
            stepped = self._step_optimizers(self._loss)
        else:
            for optimizer in self.optimizers:
                try:
                    if self._step_optimizer is None:
                        optimizer.step()
                    else:
                        stepped &= self._step_optimizer(optimizer)
                except Exception as error:
                    explain_missing_closure(error, optimizer, strategy)
                    raise
        if self._scales_loss:
            strategy.finish_step()
        return stepped

    # Rare turns

    def _close(self) -> None:
        """From here on what trains may change again: the next window sees it."""
        watch = self._trainables
        if watch.touched or tuple(map(REQUIRES_GRAD, watch.parameters)) != watch.flags:
            watch.refuse_within()
        watch.open = False

    def drop_window(self) -> None:
        self._trainables.open = False
        self._skipped = 0.0
        self.strategy.forget_gradients()
        for optimizer in self.optimizers:
            zero_grad(optimizer)

    def _weightless(self, micro: MicroBatch, batch_idx: int) -> Any:
        """Run a micro-batch that weighs nothing: a rank without data, or a batch without items."""
        sync = self.strategy.gradient_sync(micro.closes)
        trace = leaving_no_trace(self.module, self._metrics) if micro.joins else nullcontext()
        with sync, trace, self.strategy.without_gradient():
            return self.forward_backward(replace(micro, scale=1.0), batch_idx)

    def _rescale(self, window_weight: float) -> bool:
        """Divide the gradients by the weights that contributed; False where none did."""
        skipped, self._skipped = self._skipped, 0.0
        contributed = window_weight - skipped
        if contributed <= 0:
            if not self._warned:
                self._warned = True
                self._tell_no_step(skipped > 0)
            self.drop_window()
            return False
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, window_weight / contributed)
        return True

    def _tell_no_step(self, skipped: bool) -> None:
        if not skipped:
            warnings.warn("A window made no step: its weights sum to zero. Said once.", stacklevel=3)
        elif self.strategy.rank == 0:
            logger.warning(
                "A window made no step: %s.training_step returned None, or a loss that is None, for each of its "
                "micro-batches. Unless that is meant, end it with return loss. Said once.",
                type(self.module).__name__,
            )

    def _refuse(self, loss: Any, batch_idx: int) -> None:
        name = f"{type(self.module).__name__}.training_step"
        if loss is None:
            raise ConfigurationError(
                f"{name} returned None for batch {batch_idx} on rank {self.strategy.rank}.",
                "the other ranks wait for this one's gradients (under DeepSpeed, its engine does).",
                "return a loss on every rank; a batch that should not count can weigh nothing (batch_weight).",
            )
        if isinstance(loss, Tensor) and loss.dim():
            raise ConfigurationError(
                f"{name} returned a loss of shape {tuple(loss.shape)}.",
                "backward starts from one number.",
                "return its mean().",
            )
        if isinstance(loss, Tensor):
            raise ConfigurationError(
                f"{name} returned a loss that requires no gradient.",
                "it is detached from every trainable parameter.",
                "compute it from the module's output, without .detach(), .item() or torch.no_grad(); "
                "and look whether all parameters are frozen.",
            )
        raise ConfigurationError(
            f"{name} returned a {type(loss).__name__}.",
            "the engine needs a loss.",
            "return a tensor of shape (), a dict with 'loss', or None to skip the batch.",
        )


def called_by(
    runner: StepRunner, step: Callable[..., Any], arguments: StepArguments | None
) -> Callable[[Any, int], Any]:
    """What ``runner(step, ...)`` comes to for a batch and its index: the step itself, where a runner only calls it."""
    call = step if runner is operator.call else partial(runner, step)
    return call if arguments is None else arguments.given_to(call)


def enters_sync(strategy: Strategy) -> bool:
    """Whether gradients are exchanged by a context of the strategy's, rather than by its backward or a wrapper."""
    return not isinstance(strategy.gradient_sync(True), nullcontext)


def backward_of(strategy: Strategy) -> Callable[[Tensor], object] | None:
    """What ``strategy.backward`` comes to; None for no more than ``loss.backward()``."""
    if is_overridden("backward", strategy, Strategy):
        return strategy.backward
    if is_overridden("backward", strategy.precision, Precision):
        return strategy.precision.backward
    return None


def step_of(strategy: Strategy) -> Callable[[Optimizer], bool] | None:
    """What ``strategy.optimizer_step`` comes to; None for no more than ``optimizer.step()``."""
    if is_overridden("optimizer_step", strategy, Strategy):
        return strategy.optimizer_step
    return strategy.precision.step if is_overridden("step", strategy.precision, Precision) else None
