"""The training step: forward and backward of a micro-batch, and the optimizer step at the end of a window."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import explain_missing_closure
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.step_arguments import StepArguments, WrappedModule
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.uneven_inputs import without_side_effects
from drivetrain._loops.windows import MicroBatch
from drivetrain._loops.zero_grad import zero_grad
from drivetrain._metrics import MetricStore
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import StepRunner, Strategy

logger = logging.getLogger("drivetrain")

ClipGradients = Callable[[Sequence[Optimizer]], Any]
StepOptimizers = Callable[..., bool]
"""Takes the last loss and, if the optimizer needs one, a closure; returns whether the optimizers stepped."""


class TrainStep(Protocol):
    """How a micro-batch is trained on: with automatic optimization, with closures, or with manual optimization.

    `TrainLoop` calls the methods in the order in which they are listed here.
    """

    @property
    def last_loss(self) -> Tensor | None:
        """The loss of the last micro-batch, of shape (); None with manual optimization."""

    @property
    def manual_step_missing(self) -> bool:
        """Whether ``training_step`` has to step the optimizers itself and has not done so yet."""

    def zero_grad(self) -> None:
        """Clear the gradients before a window's first micro-batch."""

    def forward_backward(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        """Run forward and backward on one micro-batch; return the output of ``training_step``."""

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        """Clip gradients and step the optimizers after a window's last micro-batch; return whether they stepped."""

    def drop_window(self) -> None:
        """Discard the open window and its gradients."""

    def release(self) -> None:
        """Drop the last loss, after training ended or failed.

        A loss that has backward hooks keeps its autograd graph, and with FSDP and DeepSpeed the hooks refer to the
        module. The garbage collector does not see references from a graph, so it could never free the module.
        """


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The optimizers, and what happens to their gradients at the end of a window.

    Attributes:
        optimizers: the optimizers, in the order in which they step.
        clip: clips the gradients of the optimizers; None without clipping.
        zero_grad: clears the gradients of one optimizer before a window; by default sets them to None.
        override: calls the module's ``optimizer_step`` for each optimizer; None if the module does not override it.
        unscale_first: whether gradients are unscaled before the hooks and ``clip`` are called; otherwise ``clip``
            unscales the gradients.
    """

    optimizers: Sequence[Optimizer]
    clip: ClipGradients | None = None
    zero_grad: Callable[[Optimizer], object] = zero_grad
    override: StepOptimizers | None = None
    unscale_first: bool = False


class AutomaticStep:
    """Runs forward and backward, and steps the optimizers after a window's last micro-batch.

    Args:
        wrapped: the module and the strategy that runs it.
        hooks: the overridden hooks.
        metrics: the logged values.
        trainables: tracks which parameters train.
        step: the optimizers, and what happens to their gradients.
        arguments: builds the arguments of ``training_step``; None if it takes ``(batch, batch_idx)``.
    """

    def __init__(
        self,
        wrapped: WrappedModule,
        hooks: HookTable,
        metrics: MetricStore,
        trainables: Trainables,
        step: OptimizerStep,
        arguments: StepArguments | None,
    ) -> None:
        self.module = wrapped.module
        self.strategy = strategy = wrapped.strategy
        self.optimizers = tuple(step.optimizers)
        self._training_step: Callable[[Any, int], Any] = self._run_first_step
        self._later_training_step = bind_step(wrapped.runner, wrapped.module.training_step, arguments)
        self._metrics = metrics
        self._trainables = trainables
        self._tracks_trainables = trainables.checks_each_window
        self._clip = step.clip
        self._zero_grad = step.zero_grad
        self._override = step.override
        self._unscales_first = step.unscale_first
        self._before_zero_grad = hooks.on_before_zero_grad
        self._before_backward = hooks.on_before_backward
        self._after_backward = hooks.on_after_backward
        self._before_step = hooks.on_before_optimizer_step
        self._scales_loss = strategy.precision.scales_loss
        self._backward = resolve_backward(wrapped.module, strategy)
        self._defers_sync = is_overridden("gradient_sync", strategy, Strategy)
        self._syncs_in_context = syncs_in_context(strategy)
        self._step_optimizer = resolve_optimizer_step(strategy)
        self._none_allowed = strategy.world_size == 1 and strategy.accepts_none_loss
        self._skipped = 0.0  # weight of the window's micro-batches whose loss was None
        self._loss: Tensor | None = None
        self._has_warned_of_no_step = False

    manual_step_missing = False

    @property
    def last_loss(self) -> Tensor | None:
        return self._loss

    # The methods that run for every micro-batch or window

    def zero_grad(self) -> None:
        # Called before the forward, so that the forward's activations can use the memory of the old gradients.
        for hook in self._before_zero_grad:
            for optimizer in self.optimizers:
                hook(optimizer)
        for optimizer in self.optimizers:
            self._zero_grad(optimizer)
        if self._tracks_trainables:
            trainables = self._trainables
            if trainables.has_changed():
                trainables.adapt_strategy()
            trainables.window_open = True

    def forward_backward(self, micro_batch: MicroBatch, batch_idx: int, in_context: bool = False) -> Any:
        """Run forward and backward on one micro-batch, with the loss scaled to the micro-batch's share of the window.

        Args:
            micro_batch: the micro-batch.
            batch_idx: the micro-batch's index in the epoch.
            in_context: whether the contexts that the micro-batch needs have been entered. One method handles both
                cases, because another call would cost time in every step.
        """
        if not in_context:
            if micro_batch.weight == 0:
                return self._run_weightless(micro_batch, batch_idx)
            if self._defers_sync and (self._syncs_in_context or not micro_batch.closes):
                with self.strategy.gradient_sync(micro_batch.closes):
                    return AutomaticStep.forward_backward(self, micro_batch, batch_idx, in_context=True)
        output = self._training_step(micro_batch.batch, batch_idx)
        if self._tracks_trainables and self._trainables.has_changed():
            self._trainables.raise_if_changed()
        loss = output["loss"] if isinstance(output, dict) and "loss" in output else output
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            if loss is None and self._none_allowed:
                self._skipped += micro_batch.weight
                return None
            self._raise_invalid_loss(loss, batch_idx)
        for hook in self._before_backward:
            hook(loss)
        self._loss = loss
        scaled = loss if micro_batch.scale == 1.0 else loss * micro_batch.scale
        if self._backward is None:
            scaled.backward()
        else:
            self._backward(scaled)
        for hook in self._after_backward:
            hook()
        return output

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        if (self._skipped or not micro_batch.window_weight) and not self._rescale(micro_batch.window_weight):
            return False
        if self._tracks_trainables:
            self._close_trainables()
        strategy = self.strategy
        if self._unscales_first:
            for optimizer in self.optimizers:
                strategy.unscale(optimizer)
        for hook in self._before_step:
            for optimizer in self.optimizers:
                hook(optimizer)
        if self._clip is not None:
            self._clip(self.optimizers)
        stepped = True
        if self._override is not None:
            stepped = self._override(self._loss)
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

    def _run_first_step(self, batch: Any, batch_idx: int) -> Any:
        from drivetrain._loops.first_step_checks import run_first_step  # later steps do not need it

        self._training_step = self._later_training_step
        return run_first_step(self._training_step, self.module, self.optimizers, batch, batch_idx)

    # Closing and dropping windows, micro-batches without weight, and losses that are None or invalid

    def _close_trainables(self) -> None:
        """Check that no parameter changed within the window, and allow changes until the next window opens."""
        if self._trainables.has_changed():
            self._trainables.raise_if_changed()
        self._trainables.window_open = False

    def drop_window(self) -> None:
        self._trainables.window_open = False
        self._skipped = 0.0
        self.strategy.forget_gradients()
        for optimizer in self.optimizers:
            zero_grad(optimizer)

    def release(self) -> None:
        self._loss = None

    def _run_weightless(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        """Run a micro-batch of weight 0: either this rank has no data left and only joins, or the batch is empty."""
        sync = self.strategy.gradient_sync(micro_batch.closes)
        effects = without_side_effects(self.module, self._metrics) if micro_batch.joins else nullcontext()
        with sync, effects, self.strategy.zeroed_gradients():
            unscaled = replace(micro_batch, scale=1.0)
            return AutomaticStep.forward_backward(self, unscaled, batch_idx, in_context=True)

    def _rescale(self, window_weight: float) -> bool:
        """Normalize gradients by the weights of the micro-batches that had a loss; return False if none had a loss."""
        skipped, self._skipped = self._skipped, 0.0
        contributed = window_weight - skipped
        if contributed <= 0:
            if not self._has_warned_of_no_step:
                self._has_warned_of_no_step = True
                self._warn_of_no_step(skipped > 0)
            self.drop_window()
            return False
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, window_weight / contributed)
        return True

    def _warn_of_no_step(self, skipped: bool) -> None:
        if not skipped:
            warnings.warn(
                "An accumulation window made no step, because the weights of its batches sum to zero. "
                "This warning is not repeated.",
                stacklevel=3,
            )
        elif self.strategy.rank == 0:
            logger.warning(
                "A window made no step: %s.training_step returned None, or a loss that is None, for each of its "
                "micro-batches. Unless that is intended, end training_step with return loss. "
                "This warning is not repeated.",
                type(self.module).__name__,
            )

    def _raise_invalid_loss(self, loss: Any, batch_idx: int) -> None:
        name = f"{type(self.module).__name__}.training_step"
        if loss is None:
            raise ConfigurationError(
                f"{name} returned None for batch {batch_idx} on rank {self.strategy.rank}.",
                "the other ranks wait for this rank's gradients, and DeepSpeed expects a backward of each micro-batch.",
                "return a loss on every rank; to leave a batch out, give it the weight 0 (batch_weight).",
            )
        if isinstance(loss, Tensor) and loss.dim():
            raise ConfigurationError(
                f"{name} returned a loss of shape {tuple(loss.shape)}.",
                "backward starts from a scalar.",
                "return loss.mean().",
            )
        if isinstance(loss, Tensor):
            raise ConfigurationError(
                f"{name} returned a loss that requires no gradient.",
                "the loss is detached from every trainable parameter.",
                "compute the loss from the module's output, without .detach(), .item() or torch.no_grad(); "
                "and check whether all parameters are frozen.",
            )
        raise ConfigurationError(
            f"{name} returned a {type(loss).__name__}.",
            "the engine needs a loss.",
            "return a tensor of shape (), a dict with 'loss', or None to skip the batch.",
        )


def bind_step(
    runner: StepRunner, step: Callable[..., Any], arguments: StepArguments | None
) -> Callable[[Any, int], Any]:
    """Return a function of batch and batch index that calls ``step`` through ``runner``, with as few calls as possible.

    A runner that only calls the step is omitted.
    """
    call = step if runner is operator.call else partial(runner, step)
    return call if arguments is None else arguments.adapt(call)


def syncs_in_context(strategy: Strategy) -> bool:
    """Return whether the strategy synchronizes gradients in a context, rather than in backward or a wrapper."""
    return not isinstance(strategy.gradient_sync(True), nullcontext)


def resolve_backward(module: TrainModule, strategy: Strategy) -> Callable[[Tensor], object] | None:
    """Return the function that runs backward under ``strategy``; None if backward is ``loss.backward()``."""
    if is_overridden("backward", module, TrainModule):
        from drivetrain._loops.module_backward import backward_by_module  # only modules with an override need it

        return backward_by_module(module, strategy)
    if is_overridden("backward", strategy, Strategy):
        return strategy.backward
    if is_overridden("backward", strategy.precision, Precision):
        return strategy.precision.backward
    return None


def resolve_optimizer_step(strategy: Strategy) -> Callable[[Optimizer], bool] | None:
    """Return the function that steps an optimizer under ``strategy``; None if the step is ``optimizer.step()``."""
    if is_overridden("optimizer_step", strategy, Strategy):
        return strategy.optimizer_step
    return strategy.precision.step if is_overridden("step", strategy.precision, Precision) else None
