"""Manual optimization: ``training_step`` runs backward and steps the optimizers itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import evaluates_once, explain_missing_closure
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.step import resolve_backward, syncs_in_context
from drivetrain._loops.step_arguments import StepArguments, WrappedModule
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.uneven_inputs import without_side_effects
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore
from drivetrain._run_state import Progress
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")


class OptimizerHandle:
    """An optimizer as ``self.optimizers()`` returns it: its ``step`` goes through the strategy and the precision.

    Every attribute that the handle does not have is read from the optimizer.

    Args:
        optimizer: the optimizer.
        strategy: the strategy that steps it.
        before_step: the hooks to call before the optimizer steps.
        passes_closure: whether a closure is passed on to the optimizer; otherwise the handle calls the closure once,
            before the step.
        within_forward: whether `step` is called within the precision's context of a forward, which it suspends.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Strategy,
        before_step: Sequence[Callable[..., Any]],
        passes_closure: bool,
        within_forward: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._step_optimizer: Callable[..., bool] = strategy.optimizer_step
        self._before_step = before_step
        self._passes_closure = passes_closure
        self._weights_changed = strategy.precision.weights_changed
        self._suspends_forward = within_forward and suspends_forward(strategy)
        self.may_step = True
        """Whether `step` may be called. With automatic optimization only the module's ``optimizer_step`` may."""
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
            from drivetrain._loops.first_step_checks import refuse_step  # only this error needs it

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
                    self.stepped = self._step_optimizer(self.optimizer)
            else:
                self.stepped = self._step_optimizer(self.optimizer)
        except Exception as error:
            explain_missing_closure(error, self.optimizer, self._strategy)
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
            self.stepped = self._step_optimizer(self.optimizer, evaluate)
        self._weights_changed()
        return losses[0] if losses else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters."""
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # copy and pickle read attributes before they are set
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"


def build_optimizer_handles(
    optimizers: Sequence[Optimizer], strategy: Strategy, hooks: HookTable, automatic: bool, closure: bool
) -> list[OptimizerHandle]:
    """Return the handles that ``self.optimizers()`` returns, one for each optimizer.

    Args:
        optimizers: the optimizers.
        strategy: the strategy that steps them.
        hooks: the overridden hooks.
        automatic: whether the engine steps the optimizers and calls the hooks (automatic optimization).
        closure: whether the engine passes the optimizers a closure.
    """
    if automatic:
        handles = [OptimizerHandle(optimizer, strategy, (), closure) for optimizer in optimizers]
        for handle in handles:
            handle.may_step = False
        return handles
    before_step = hooks.on_before_optimizer_step
    return [
        OptimizerHandle(optimizer, strategy, before_step, not evaluates_once(optimizer), within_forward=True)
        for optimizer in optimizers
    ]


def suspends_forward(strategy: Strategy) -> bool:
    """Return whether a backward or a step within a forward has to suspend the precision's context of the forward."""
    return is_overridden("outside_forward", strategy.precision, Precision)


class ManualStep:
    """Runs ``training_step``, which runs backward and steps the optimizers itself.

    Args:
        wrapped: the module and the strategy that runs it.
        handles: the optimizers that ``self.optimizers()`` returns.
        hooks: the overridden hooks.
        metrics: the logged values.
        trainables: tracks which parameters train.
        arguments: builds the arguments of ``training_step``; None if it takes ``(batch, batch_idx)``.
    """

    def __init__(
        self,
        wrapped: WrappedModule,
        handles: Sequence[OptimizerHandle],
        hooks: HookTable,
        metrics: MetricStore,
        trainables: Trainables,
        arguments: StepArguments | None,
    ) -> None:
        self._module = wrapped.module
        self._run = wrapped.runner
        self._strategy = strategy = wrapped.strategy
        self._handles = handles
        self._metrics = metrics
        self._trainables = trainables
        self._arguments = arguments
        self._before_backward = hooks.on_before_backward
        self._after_backward = hooks.on_after_backward
        self._weights_changed = strategy.precision.weights_changed
        self._outside_forward = strategy.precision.outside_forward if suspends_forward(strategy) else nullcontext
        self._backward_in_context = suspends_forward(strategy) or syncs_in_context(strategy)
        self._scales_loss = strategy.precision.scales_loss
        self._scale = 1.0
        self._toggled: tuple[Any, AbstractContextManager[None]] | None = None
        self._has_stepped = False
        self._compares_samples = strategy.world_size > 1 and strategy.rank == 0
        self._versions_at_start = self._sum_versions()
        self._backward = resolve_backward(wrapped.module, strategy) or strategy.backward

    last_loss = None

    @property
    def manual_step_missing(self) -> bool:
        handles = self._handles
        if not handles or self._has_stepped or any(handle.stepped is not None for handle in handles):
            return False
        # `training_step` may step the optimizers directly, without the handles.
        return self._sum_versions() == self._versions_at_start

    def _sum_versions(self) -> int:
        """Return the sum of the parameters' version counters, which an in-place update increments."""
        groups = [group for handle in self._handles for group in handle.optimizer.param_groups]
        return sum(parameter._version for group in groups for parameter in group["params"])

    def zero_grad(self) -> None:
        """Do nothing, because ``training_step`` clears the gradients."""

    def forward_backward(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        trainables = self._trainables
        if trainables.checks_each_window:
            if trainables.has_changed():
                trainables.adapt_strategy()
            trainables.window_open = True
        if self._compares_samples and micro_batch.samples * micro_batch.ranks != micro_batch.total:
            self._warn_of_uneven_samples(micro_batch)
        # The strategy averages gradients over all ranks. The scale corrects the mean for the ranks without data.
        self._scale = self._strategy.data_world_size / micro_batch.ranks
        for handle in self._handles:
            handle.stepped = None
            handle.share = 0.0 if micro_batch.joins else self._scale
        arguments = (
            (micro_batch.batch, batch_idx) if self._arguments is None else self._arguments(micro_batch.batch, batch_idx)
        )
        try:
            if micro_batch.joins:
                with without_side_effects(self._module, self._metrics), self._strategy.zeroed_gradients():
                    output = self._run(self._module.training_step, *arguments)
            else:
                output = self._run(self._module.training_step, *arguments)
        except BaseException:
            if self._toggled is not None:  # restore requires_grad, since the module may be used after the failed run
                self._untoggle()
            raise
        if self._toggled is not None:
            self._raise_open_toggle(self._toggled[0])
        if trainables.checks_each_window:
            if trainables.has_changed():
                trainables.raise_if_changed(mention_toggling=True)
            trainables.window_open = False
        return {} if output is None else output

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; called by ``self.manual_backward``."""
        for hook in self._before_backward:
            hook(loss)
        trainables = self._trainables
        if trainables.window_open and trainables.has_changed():
            trainables.raise_if_changed(unfrozen_only=True)
        loss = loss if self._scale == 1.0 else loss * self._scale
        if self._backward_in_context:
            with self._outside_forward(), self._strategy.gradient_sync(True):
                self._backward(loss)
        else:
            self._backward(loss)
        # From here on, `training_step` may change the weights in other ways than by `OptimizerHandle.step`.
        self._weights_changed()
        for hook in self._after_backward:
            hook()

    def _warn_of_uneven_samples(self, micro_batch: MicroBatch) -> None:
        self._compares_samples = False
        logger.warning(
            "Rank %d has %d samples in a micro-batch of %d samples on %d ranks. With manual optimization each rank's "
            "gradient counts equally, so samples on ranks with fewer samples count more. drop_last=True in the "
            "DataLoader avoids this. This warning is not repeated.",
            self._strategy.rank,
            micro_batch.samples,
            micro_batch.total,
            micro_batch.ranks,
        )

    def toggle(self, optimizer: Any) -> None:
        """Disable the gradients of parameters that ``optimizer`` does not hold; called by ``self.toggle_optimizer``."""
        if self._toggled is not None:
            raise ConfigurationError(
                f"toggle_optimizer({_type_name(optimizer)}), while {_type_name(self._toggled[0])} is toggled.",
                "no parameter of either optimizer would get a gradient.",
                "call self.untoggle_optimizer first, or write 'with self.toggled_optimizer(optimizer):'.",
            )
        context = self._strategy.requiring_grad_only_for(optimizer)
        context.__enter__()
        self._toggled = (optimizer, context)

    def untoggle(self, optimizer: Any) -> None:
        """Undo `toggle`; called by ``self.untoggle_optimizer``."""
        if self._toggled is None or _unwrapped(self._toggled[0]) is not _unwrapped(optimizer):
            toggled = "none" if self._toggled is None else f"another one, {_type_name(self._toggled[0])},"
            raise ConfigurationError(
                f"untoggle_optimizer({_type_name(optimizer)}), but {toggled} is toggled.",
                "untoggle_optimizer undoes what toggle_optimizer did to the parameters of the other optimizers.",
                "call untoggle_optimizer once after each toggle_optimizer, with the same optimizer.",
            )
        self._untoggle()

    def _untoggle(self) -> None:
        assert self._toggled is not None
        context, self._toggled = self._toggled[1], None
        context.__exit__(None, None, None)

    def _raise_open_toggle(self, optimizer: Any) -> None:
        self._untoggle()
        raise ConfigurationError(
            f"{type(self._module).__name__}.training_step ended with {_type_name(optimizer)} toggled.",
            "the parameters of the other optimizers would no longer train.",
            "call self.untoggle_optimizer, or write 'with self.toggled_optimizer(optimizer):'.",
        )

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        if any(handle.stepped is not None for handle in self._handles):
            self._has_stepped = True
            if self._scales_loss:
                self._strategy.precision.keep_pending_gradients([handle.optimizer for handle in self._handles])
            self._strategy.finish_step()
        return True

    def drop_window(self) -> None:
        return None

    def release(self) -> None:
        return None


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, OptimizerHandle) else optimizer


def _type_name(optimizer: Any) -> str:
    return type(_unwrapped(optimizer)).__name__


class OverriddenOptimizerStep:
    """Steps the optimizers through a module's override of ``TrainModule.optimizer_step``.

    Args:
        module: the module.
        handles: the handle of each optimizer.
        progress: the counters, for epoch and batch index.
    """

    def __init__(self, module: TrainModule, handles: Sequence[OptimizerHandle], progress: Progress) -> None:
        self._module = module
        self._handles = handles
        self._progress = progress

    def __call__(self, loss: torch.Tensor | None, closure: Callable[[], Any] | None = None) -> bool:
        """Call ``optimizer_step`` for each optimizer; return whether all of them stepped.

        Args:
            loss: the loss of the window's last micro-batch, which the default closure returns.
            closure: evaluates the loss again; None if the optimizer needs no closure.
        """
        detached = None if loss is None else loss.detach()
        for handle in self._handles:  # all of them, because the first call may step every optimizer
            handle.stepped, handle.may_step = None, True
        for handle in self._handles:
            self._module.optimizer_step(
                self._progress.epoch, self._progress.batch_idx, handle, closure or (lambda: detached)
            )
        for handle in self._handles:
            handle.may_step = False
        return all(handle.stepped for handle in self._handles)
