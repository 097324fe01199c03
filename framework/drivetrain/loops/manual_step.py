"""Manual optimization: ``training_step`` runs backward and steps itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.hooks import HookTable
from drivetrain.loops.joining import leaving_no_trace
from drivetrain.loops.optimizers import needs_closure
from drivetrain.loops.progress import Progress
from drivetrain.loops.trainables import Trainables
from drivetrain.loops.windows import MicroBatch
from drivetrain.metrics import MetricStore
from drivetrain.module import TrainModule
from drivetrain.strategy import StepRunner, Strategy
from drivetrain.trainable import TRAINS


class OptimizerHandle:
    """An optimizer as ``self.optimizers()`` gives it: its ``step`` goes through strategy and precision.

    Every other attribute is the optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, before_step: Sequence[Callable[..., Any]]) -> None:
        self.optimizer = optimizer
        self._strategy = strategy
        self._before_step = before_step
        self.share = 1.0
        """What this rank's loss counts in the mean over ranks: zero where it only joins."""
        self.stepped: bool | None = None
        """Whether the last `step` was made; None before the first."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step; returns the closure's loss where there is a closure.

        A closure is called once, before the step, unless the optimizer is one that calls it itself (LBFGS).
        """
        if closure is not None and needs_closure(self.optimizer):
            losses: list[Any] = []

            def evaluated() -> Any:
                loss = closure()
                if self._strategy.world_size > 1:  # decided alike everywhere: line search, stopping rules
                    loss = self._strategy.reduce(torch.as_tensor(loss) * self.share, "mean")
                losses.append(loss)
                return loss

            self.stepped = self._strategy.optimizer_step(self.optimizer, evaluated)
            return losses[0] if losses else None
        loss = None if closure is None else closure()
        if self._before_step:
            self._strategy.unscale(self.optimizer)
            for hook in self._before_step:
                hook(self.optimizer)
        self.stepped = self._strategy.optimizer_step(self.optimizer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"OptimizerHandle({self.optimizer!r})"


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
        self._scale = 1.0

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        watch = self._trainables
        if watch.watches:
            if watch.touched or tuple(map(TRAINS, watch.parameters)) != watch.flags:
                watch.settle()
            watch.open = True
        # The strategy averages over all ranks; those without data count for nothing.
        self._scale = self._strategy.data_world_size / micro.ranks
        for handle in self._handles:
            handle.stepped = None
            handle.share = 0.0 if micro.joins else self._scale
        arguments = (micro.batch, batch_idx) if self._arguments is None else self._arguments(micro.batch, batch_idx)
        if micro.joins:
            with leaving_no_trace(self._module, self._metrics), self._strategy.without_gradient():
                output = self._run(self._module.training_step, *arguments)
        else:
            output = self._run(self._module.training_step, *arguments)
        if watch.watches:
            if tuple(map(TRAINS, watch.parameters)) != watch.flags:
                watch.refuse_within()
            watch.open = False
        return {} if output is None else output

    def backward(self, loss: torch.Tensor) -> None:
        """What ``self.manual_backward`` does."""
        for hook in self._before_backward:
            hook(loss)
        watch = self._trainables
        if watch.open and tuple(map(TRAINS, watch.parameters)) != watch.flags:
            watch.refuse_within(unfrozen_only=True)
        self._strategy.backward(loss if self._scale == 1.0 else loss * self._scale)
        for hook in self._after_backward:
            hook()

    def close_window(self, micro: MicroBatch) -> bool:
        if any(handle.stepped is not None for handle in self._handles):
            self._strategy.finish_step()
        return True

    def drop_window(self) -> None:
        return None


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
