"""The training step: forward and backward of a micro-batch, and the optimizer step at the end of a window."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import explain_missing_closure
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.step_calls import bind_step, resolve_backward, resolve_optimizer_step, syncs_in_context
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.uneven_inputs import without_side_effects
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore
from drivetrain._run_state import Optimization, Progress
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import StepRunner, Strategy

logger = logging.getLogger("drivetrain")

ClipGradients = Callable[[Sequence[Optimizer]], Any]
RunMicroBatch = Callable[[MicroBatch, int], Any]
"""Runs forward and backward on a micro-batch, given its index in the epoch; returns the output of ``training_step``."""

_TORCH_ZERO_GRAD = Optimizer.zero_grad


@dataclass(eq=False)
class TrainStep:
    """How a micro-batch is trained on: with automatic optimization, with closures, or with manual optimization.

    For each micro-batch, `TrainLoop` calls `zero_grad` if a window opens, then `forward_backward` or `run_weightless`,
    and `clip_and_step` if the window closes.

    Attributes:
        module: the user's module.
        runner: the function that `Strategy.setup_module` returned, which calls a step of the module.
        strategy: the strategy that runs the module.
        hooks: the overridden hooks.
        metrics: the logged values.
        trainables: tracks which parameters train.
    """

    module: TrainModule
    runner: StepRunner
    strategy: Strategy
    hooks: HookTable
    metrics: MetricStore
    trainables: Trainables

    forward_backward: RunMicroBatch = field(init=False)
    """Runs a micro-batch. It is an attribute, since the strategy and features of the run choose or wrap it once."""
    run_weightless: RunMicroBatch = field(init=False)
    """Runs a micro-batch of weight 0: either this rank has no data left and only joins, or the batch is empty."""
    last_loss: Tensor | None = field(default=None, init=False)
    """The last loss of which a backward was run, of shape ()."""

    def __post_init__(self) -> None:
        self._training_step = bind_step(self.runner, self.module.training_step)
        self.run_backward = resolve_backward(self.module, self.strategy)
        self._before_backward = self.hooks.on_before_backward
        self._after_backward = self.hooks.on_after_backward
        self._scales_loss = self.strategy.precision.scales_loss

    @property
    def manual_step_missing(self) -> bool:
        """Whether ``training_step`` has to step the optimizers itself and has not done so yet."""
        return False

    def zero_grad(self) -> None:
        """Clear the gradients before a window's first micro-batch."""

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        """Clip gradients and step the optimizers after a window's last micro-batch; return whether they stepped."""
        raise NotImplementedError

    def drop_window(self) -> None:
        """Discard the open window and its gradients."""

    def release(self) -> None:
        """Drop the last loss, after training ended or failed.

        A loss that has backward hooks keeps its autograd graph, and with FSDP and DeepSpeed the hooks refer to the
        module. The garbage collector does not see references from a graph, so it could never free the module.
        """
        self.last_loss = None


@dataclass(eq=False)
class AutomaticStep(TrainStep):
    """Runs forward and backward, and steps the optimizers after a window's last micro-batch.

    Attributes:
        optimization: the optimizers, in the order in which they step.
        progress: the counters, of which overridden methods of the module get epoch and batch index.
        clip: clips the gradients of the optimizers; None without clipping.
        unscales_first: whether gradients are unscaled before the hooks and ``clip`` are called; otherwise ``clip``
            unscales the gradients.
    """

    optimization: Optimization
    progress: Progress
    clip: ClipGradients | None
    unscales_first: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        module, strategy, hooks = self.module, self.strategy, self.hooks
        self.optimizers = tuple(self.optimization.optimizers)
        defers_sync = is_overridden("gradient_sync", strategy, Strategy)
        self.forward_backward = self._run_and_sync if defers_sync else self._run
        self.run_weightless = self._run_weightless
        self._syncs_in_context = syncs_in_context(strategy)
        self._later_training_step, self._training_step = self._training_step, self._run_first_step
        self._tracks_trainables = self.trainables.checks_each_window
        self._before_zero_grad, self._before_step = hooks.on_before_zero_grad, hooks.on_before_optimizer_step
        self._step_optimizer = resolve_optimizer_step(strategy)
        is_stepped_by_module = is_overridden("optimizer_step", module, TrainModule)
        self._step_together: Callable[[], bool] | None = self._step_by_module if is_stepped_by_module else None
        is_cleared_by_module = is_overridden("optimizer_zero_grad", module, TrainModule)
        self._clear_by_module = module.optimizer_zero_grad if is_cleared_by_module else None
        self._none_allowed = strategy.world_size == 1 and strategy.accepts_none_loss
        self._skipped = 0.0  # weight of the window's micro-batches whose loss was None
        self._has_warned_of_no_step = False

    # The methods that run for every micro-batch or window

    def zero_grad(self) -> None:
        # Called before the forward, so that the forward's activations can use the memory of the old gradients.
        for hook in self._before_zero_grad:
            for optimizer in self.optimizers:
                hook(optimizer)
        for optimizer in self.optimizers:
            if self._clear_by_module is not None:
                self._clear_by_module(self.progress.epoch, self.progress.batch_idx, optimizer)
            elif getattr(optimizer.zero_grad, "__func__", None) is not _TORCH_ZERO_GRAD:
                optimizer.zero_grad()
            else:  # torch's own method spends 6 us on a profiler entry first, and these lines take 0.5 us
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad = None
        if self._tracks_trainables:
            trainables = self.trainables
            if trainables.has_changed():
                trainables.adapt_strategy()
            trainables.window_open = True

    def _run(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        """Run forward and backward, with the loss scaled to the micro-batch's share of the window."""
        output = self._training_step(micro_batch.batch, batch_idx)
        if self._tracks_trainables and self.trainables.has_changed():
            self.trainables.raise_if_changed()
        loss = output["loss"] if isinstance(output, dict) and "loss" in output else output
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            if loss is None and self._none_allowed:
                self._skipped += micro_batch.weight
                return None
            self._raise_invalid_loss(loss, batch_idx)
        for hook in self._before_backward:
            hook(loss)
        self.last_loss = loss
        self.run_backward(loss if micro_batch.scale == 1.0 else loss * micro_batch.scale)
        for hook in self._after_backward:
            hook()
        return output

    def _run_and_sync(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        """Run a micro-batch under a strategy that synchronizes gradients only in a window's last one."""
        if micro_batch.closes and not self._syncs_in_context:
            return self._run(micro_batch, batch_idx)
        with self.strategy.gradient_sync(micro_batch.closes):
            return self._run(micro_batch, batch_idx)

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        if (self._skipped or not micro_batch.window_weight) and not self._rescale(micro_batch.window_weight):
            return False
        if self._tracks_trainables:
            if self.trainables.has_changed():
                self.trainables.raise_if_changed()
            self.trainables.window_open = False
        strategy = self.strategy
        if self.unscales_first:
            for optimizer in self.optimizers:
                strategy.unscale(optimizer)
        for hook in self._before_step:
            for optimizer in self.optimizers:
                hook(optimizer)
        if self.clip is not None:
            self.clip(self.optimizers)
        stepped = True
        if self._step_together is not None:
            stepped = self._step_together()
        else:
            for optimizer in self.optimizers:
                try:
                    if self._step_optimizer is None:
                        optimizer.step()
                    else:
                        stepped &= self._step_optimizer(optimizer)
                except Exception as error:
                    explain_missing_closure(error, optimizer)
                    raise
        if self._scales_loss:
            strategy.finish_step()
        return stepped

    # What only some runs need: a module that steps the optimizers, micro-batches without weight or loss

    def _step_by_module(self, closure: Callable[[], Any] | None = None) -> bool:
        """Step by the module's override of ``optimizer_step``; return whether all optimizers stepped.

        Args:
            closure: evaluates the loss again; None for a closure that returns the last micro-batch's loss.
        """
        loss = None if self.last_loss is None else self.last_loss.detach()
        handles, progress = self.optimization.handles, self.progress
        for handle in handles:  # all of them, because the first call may step every optimizer
            handle.stepped, handle.may_step = None, True
        for handle in handles:
            self.module.optimizer_step(progress.epoch, progress.batch_idx, handle, closure or (lambda: loss))
        for handle in handles:
            handle.may_step = False
        return all(handle.stepped for handle in handles)

    def drop_window(self) -> None:
        self.trainables.window_open = False
        self._skipped = 0.0
        self.strategy.forget_gradients()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _run_weightless(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        sync = self.strategy.gradient_sync(micro_batch.closes)
        effects = without_side_effects(self.module, self.metrics) if micro_batch.joins else nullcontext()
        with sync, effects, self.strategy.zeroed_gradients():
            return self._run(replace(micro_batch, scale=1.0), batch_idx)

    def _rescale(self, window_weight: float) -> bool:
        """Normalize gradients by the weights of the micro-batches that had a loss; return False if none had a loss."""
        skipped, self._skipped = self._skipped, 0.0
        contributed = window_weight - skipped
        if contributed <= 0:
            if not self._has_warned_of_no_step and self.strategy.rank == 0:
                logger.warning(
                    "A window made no step: %s.training_step returned no loss, or the weights of the micro-batches sum "
                    "to zero. Unless that is intended, end training_step with return loss, and check batch_weight. "
                    "This warning is not repeated.",
                    type(self.module).__name__,
                )
            self._has_warned_of_no_step = True
            self.drop_window()
            return False
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, window_weight / contributed)
        return True

    def _raise_invalid_loss(self, loss: Any, batch_idx: int) -> None:
        name = f"{type(self.module).__name__}.training_step"
        if loss is None:
            raise ConfigurationError(
                f"{name} returned None for batch {batch_idx} on rank {self.strategy.rank}.",
                "the other ranks wait for this rank's gradients, and DeepSpeed expects a backward of each micro-batch.",
                "return a loss on every rank; to leave a batch out, give it the weight 0 (batch_weight).",
            )
        returned = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            returned = f"a loss of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}"
        raise ConfigurationError(
            f"{name} returned {returned}.",
            "the engine runs the backward of a scalar that depends on trainable parameters.",
            "return a tensor of shape (), such as loss.mean(), computed without .detach(), .item() or torch.no_grad(); "
            "a dict with 'loss'; or None to skip the batch. Check whether all parameters are frozen.",
        )

    # The first micro-batch of a run

    def _run_first_step(self, batch: Any, batch_idx: int) -> Any:
        """Run ``training_step``, and refuse a backward or a step by hand. Later micro-batches are not checked."""
        self._training_step = self._later_training_step
        parameters = self._optimized_parameters()
        before = _gradients(parameters)
        with ExitStack() as hooks:
            for optimizer in self.optimizers:
                # An optimizer that wraps another one may not have called Optimizer.__init__, and then has no hooks.
                with suppress(AttributeError):
                    hooks.callback(optimizer.register_step_pre_hook(refuse_step).remove)
            output = self._training_step(batch, batch_idx)
        if _gradients(parameters) - before:
            raise ConfigurationError(
                f"{type(self.module).__name__}.training_step ran a backward by hand (or torch.autograd.grad, with "
                "sharded parameters).",
                "with automatic optimization the engine runs the backward of the returned loss, so gradients would be "
                "added twice; and of a sharded module torch can run only one backward per forward.",
                f"{_FIX_BY_HAND} For a gradient of a gradient, use strategy='ddp'.",
            )
        return output

    def _optimized_parameters(self) -> list[Parameter]:
        """Return the module's parameters, without those that only an optimizer of the user's own may hold.

        An optimizer whose parameters are not the module's, as ZeRO's are, may step any parameter of the module.
        """
        parameters = list(self.module.parameters())
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        held = {id(parameter) for group in groups for parameter in group["params"]}
        if not held <= set(map(id, parameters)):
            return parameters
        return [parameter for parameter in parameters if id(parameter) in held]


_FIX_BY_HAND = (
    "only return the loss; or set self.automatic_optimization = False in __init__, and call self.manual_backward(loss) "
    "and step() of self.optimizers() in training_step."
)


def refuse_step(optimizer: Optimizer, *_: Any) -> NoReturn:
    """Raise the error about an optimizer's step by hand, with automatic optimization."""
    raise ConfigurationError(
        f"{type(optimizer).__name__}.step was called by hand, for example in training_step.",
        "with automatic optimization the engine steps the optimizers after the backward of the returned loss.",
        _FIX_BY_HAND,
    )


def _gradients(parameters: Sequence[Parameter]) -> set[tuple[int, int, int]]:
    """Return the parameter, identity and version of each gradient."""
    gradients = [(id(parameter), parameter.grad) for parameter in parameters]
    return {(owner, id(gradient), gradient._version) for owner, gradient in gradients if gradient is not None}
