"""Manual optimization: ``training_step`` runs backward and steps itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from drivetrain._loops.configured_optimizers import evaluates_once, explain_missing_closure
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.progress import Progress
from drivetrain._loops.step import enters_sync
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.uneven_inputs import leaving_no_trace
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies._trainable import REQUIRES_GRAD
from drivetrain.strategies.strategy import StepRunner, Strategy


class Contexts(NamedTuple):
    """In which a forward runs, and what is outside of it where ``training_step`` does both."""

    forward: Callable[[], AbstractContextManager[Any]]
    outside: Callable[[], AbstractContextManager[Any]]


_NO_CONTEXTS = Contexts(nullcontext, nullcontext)


class OptimizerHandle:
    """An optimizer as ``self.optimizers()`` gives it: its ``step`` goes through strategy and precision.

    Every other attribute is the optimizer's own.

    Args:
        optimizer: which.
        strategy: where it steps.
        before_step: hooks to call before it does.
        passes_closure: whether a closure evaluates the loss anew and reaches the optimizer; else it is called once,
            before the step.
        weights_changed: to be called when they have; None where nobody keeps what was derived from them.
        contexts: of a forward, and of what is outside of it, such as a step; None where neither does anything.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Strategy,
        before_step: Sequence[Callable[..., Any]],
        passes_closure: bool,
        weights_changed: Callable[[], None] | None = None,
        contexts: Contexts | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._step_optimizer: Callable[..., bool] = strategy.optimizer_step
        self._before_step = before_step
        self._passes_closure = passes_closure
        self._weights_changed = weights_changed or _nothing
        self._contexts = contexts
        self.share = 1.0
        """What this rank's loss counts in the mean over ranks: zero where it only joins."""
        self.stepped: bool | None = None
        """Whether the last `step` was made; None before the first."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step; returns the closure's loss, of its first evaluation, where there is a closure.

        The optimizer evaluates it as often as it likes, and gets the mean loss of all ranks. For torch's own but LBFGS,
        which would do so once, it is evaluated here.

        Raises:
            ConfigurationError: there is no closure, and the optimizer cannot do without.
        """
        if closure is not None and self._passes_closure:
            return self._step_with(closure)
        loss = None if closure is None else closure()
        if self._before_step:
            self._strategy.unscale(self.optimizer)
            for hook in self._before_step:
                hook(self.optimizer)
        try:
            if self._contexts is None:
                self.stepped = self._step_optimizer(self.optimizer)
            else:
                with self._contexts.outside():
                    self.stepped = self._step_optimizer(self.optimizer)
        except Exception as error:
            explain_missing_closure(error, self.optimizer, self._strategy)
            raise
        self._weights_changed()
        return loss

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        losses: list[Any] = []
        contexts = self._contexts or _NO_CONTEXTS

        def evaluated() -> Any:
            self._weights_changed()
            with contexts.forward():
                loss = closure()
            if loss is not None and self._strategy.world_size > 1:  # line search and stopping rules decide alike
                loss = self._strategy.reduce(torch.as_tensor(loss).detach() * self.share, "mean")
            if not losses:
                for hook in self._before_step:
                    hook(self.optimizer)
            losses.append(loss)
            return loss

        with contexts.outside():
            self.stepped = self._step_optimizer(self.optimizer, evaluated)
        self._weights_changed()
        return losses[0] if losses else None

    def wrap(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around the optimizer's step."""
        self._step_optimizer = around("optimizer", self._step_optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"


def handles_of(
    optimizers: Sequence[Optimizer], strategy: Strategy, hooks: HookTable, automatic: bool, closure: bool
) -> list[OptimizerHandle]:
    """Return what ``self.optimizers()`` gives.

    Args:
        optimizers: one handle for each.
        strategy: where they step.
        hooks: who overrode what.
        automatic: whether the engine steps them, and calls the hooks.
        closure: whether it gives them a closure that evaluates the loss anew.
    """
    if automatic:
        return [OptimizerHandle(optimizer, strategy, (), closure) for optimizer in optimizers]
    before_step = hooks.on_before_optimizer_step
    weights_changed, contexts = changed_weights_of(strategy), contexts_of(strategy)
    return [
        OptimizerHandle(optimizer, strategy, before_step, not evaluates_once(optimizer), weights_changed, contexts)
        for optimizer in optimizers
    ]


def contexts_of(strategy: Strategy) -> Contexts | None:
    """The contexts of ``strategy.precision``; None where there is nothing to leave for a backward or a step."""
    precision = strategy.precision
    if not is_overridden("outside_forward", precision, Precision):
        return None
    return Contexts(precision.forward_context, precision.outside_forward)


def changed_weights_of(strategy: Strategy) -> Callable[[], None] | None:
    """What ``strategy.precision.weights_changed`` comes to; None for nothing."""
    precision = strategy.precision
    return precision.weights_changed if is_overridden("weights_changed", precision, Precision) else None


def _nothing() -> None:
    return None


class ManualStep:
    """Runs ``training_step`` and leaves the rest to it.

    Args:
        module: whose ``training_step`` is run.
        runner: the strategy's callable that every step runs through.
        strategy: where.
        handles: what ``self.optimizers()`` gives.
        hooks: who overrode what.
        metrics: where values are logged.
        trainables: watches what trains.
        arguments: builds the step's arguments where it does not take both.
    """

    def __init__(
        self,
        module: TrainModule,
        runner: StepRunner,
        strategy: Strategy,
        handles: Sequence[OptimizerHandle],
        hooks: HookTable,
        metrics: MetricStore,
        trainables: Trainables,
        arguments: Callable[[Any, int], tuple[Any, ...]] | None,
    ) -> None:
        self._module = module
        self._run = runner
        self._strategy = strategy
        self._handles = handles
        self._metrics = metrics
        self._trainables = trainables
        self._arguments = arguments
        self._before_backward = hooks.on_before_backward
        self._after_backward = hooks.on_after_backward
        self._weights_changed = changed_weights_of(strategy) or _nothing
        self._contexts = contexts_of(strategy)
        self._enters_sync = enters_sync(strategy)
        self._scales_loss = strategy.precision.scales_loss
        self._scale = 1.0
        self._toggled: tuple[Any, AbstractContextManager[None]] | None = None
        self._has_stepped = False
        self._changes = self._count_changes()
        self._backward: Callable[[torch.Tensor], object] = strategy.backward

    def wrap(self, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around backward and the optimizers' steps, before the first of them.

        Args:
            around: takes "backward" or "optimizer", and what does it.
        """
        self._backward = around("backward", self._backward)
        for handle in self._handles:
            handle.wrap(around)

    last_loss = None

    @property
    def never_steps(self) -> bool:
        handles = self._handles
        if not handles or self._has_stepped or any(handle.stepped is not None for handle in handles):
            return False
        return self._count_changes() == self._changes  # else it steps the optimizers themselves, without the handles

    def _count_changes(self) -> int:
        groups = [group for handle in self._handles for group in handle.optimizer.param_groups]
        return sum(parameter._version for group in groups for parameter in group["params"])

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        watch = self._trainables
        if watch.watches:
            if watch.touched or tuple(map(REQUIRES_GRAD, watch.parameters)) != watch.flags:
                watch.settle()
            watch.open = True
        # The strategy averages over all ranks; those without data count for nothing.
        self._scale = self._strategy.data_world_size / micro.ranks
        for handle in self._handles:
            handle.stepped = None
            handle.share = 0.0 if micro.joins else self._scale
        arguments = (micro.batch, batch_idx) if self._arguments is None else self._arguments(micro.batch, batch_idx)
        try:
            if micro.joins:
                with leaving_no_trace(self._module, self._metrics), self._strategy.without_gradient():
                    output = self._run(self._module.training_step, *arguments)
            else:
                output = self._run(self._module.training_step, *arguments)
        except BaseException:
            if self._toggled is not None:  # the module outlives the run
                self._take_back_toggle()
            raise
        if self._toggled is not None:
            self._refuse_open_toggle(self._toggled[0])
        if watch.watches:
            if watch.touched or tuple(map(REQUIRES_GRAD, watch.parameters)) != watch.flags:
                watch.refuse_within(toggles=True)
            watch.open = False
        return {} if output is None else output

    def backward(self, loss: torch.Tensor) -> None:
        """What ``self.manual_backward`` does."""
        for hook in self._before_backward:
            hook(loss)
        watch = self._trainables
        if watch.open and (watch.touched or tuple(map(REQUIRES_GRAD, watch.parameters)) != watch.flags):
            watch.refuse_within(unfrozen_only=True)
        loss = loss if self._scale == 1.0 else loss * self._scale
        if self._contexts is None and not self._enters_sync:
            self._backward(loss)
        else:
            with (self._contexts or _NO_CONTEXTS).outside(), self._strategy.gradient_sync(True):
                self._backward(loss)
        # What changes the weights from here on need not be a step of ours.
        self._weights_changed()
        for hook in self._after_backward:
            hook()

    def toggle(self, optimizer: Any) -> None:
        """What ``self.toggle_optimizer`` does."""
        if self._toggled is not None:
            raise ConfigurationError(
                f"toggle_optimizer({_kind(optimizer)}), while {_kind(self._toggled[0])} is toggled.",
                "the parameters of both would be without a gradient.",
                "call self.untoggle_optimizer first, or use with self.toggled_optimizer(optimizer).",
            )
        context = self._strategy.training_only(optimizer)
        context.__enter__()
        self._toggled = (optimizer, context)

    def untoggle(self, optimizer: Any) -> None:
        """What ``self.untoggle_optimizer`` does."""
        if self._toggled is None or _plain(self._toggled[0]) is not _plain(optimizer):
            what = "none is" if self._toggled is None else f"{_kind(self._toggled[0])} is another one, and"
            raise ConfigurationError(
                f"untoggle_optimizer({_kind(optimizer)}), but {what} toggled.",
                "it takes back what toggle_optimizer did to the parameters of the others.",
                "call it once after each toggle_optimizer, with the same optimizer.",
            )
        self._take_back_toggle()

    def _take_back_toggle(self) -> None:
        assert self._toggled is not None
        context, self._toggled = self._toggled[1], None
        context.__exit__(None, None, None)

    def _refuse_open_toggle(self, optimizer: Any) -> None:
        self._take_back_toggle()
        raise ConfigurationError(
            f"{type(self._module).__name__}.training_step ended with {_kind(optimizer)} toggled.",
            "the other optimizers' parameters would train no more.",
            "call self.untoggle_optimizer, or use with self.toggled_optimizer(optimizer).",
        )

    def close_window(self, micro: MicroBatch) -> bool:
        if any(handle.stepped is not None for handle in self._handles):
            self._has_stepped = True
            if self._scales_loss:
                self._strategy.precision.gradients_wait([handle.optimizer for handle in self._handles])
            self._strategy.finish_step()
        return True

    def drop_window(self) -> None:
        return None


def _plain(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, OptimizerHandle) else optimizer


def _kind(optimizer: Any) -> str:
    return type(_plain(optimizer)).__name__


class OverriddenSteps:
    """Steps through ``TrainModule.optimizer_step`` where the module overrides it.

    Args:
        module: whose hook is called.
        handles: one for each optimizer.
        progress: tells epoch and batch index.
    """

    def __init__(self, module: TrainModule, handles: Sequence[OptimizerHandle], progress: Progress) -> None:
        self._module = module
        self._handles = handles
        self._progress = progress

    def __call__(self, loss: torch.Tensor | None, closure: Callable[[], Any] | None = None) -> bool:
        """Call the hook for each optimizer; False where one of them was made to skip or was not stepped.

        Args:
            loss: the window's last, which the hook's closure returns.
            closure: what evaluates the loss anew, where the optimizer needs that.
        """
        detached = None if loss is None else loss.detach()
        for handle in self._handles:
            handle.stepped = None
            self._module.optimizer_step(
                self._progress.epoch, self._progress.batch_idx, handle, closure or (lambda: detached)
            )
        return all(handle.stepped for handle in self._handles)
