"""Manual optimization: ``training_step`` runs backward and steps the optimizers itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain._loops.optimizer_handle import OptimizerHandle
from drivetrain._loops.step import TrainStep
from drivetrain._loops.step_calls import suspends_forward, syncs_in_context
from drivetrain._loops.uneven_inputs import without_side_effects
from drivetrain._loops.windows import MicroBatch
from drivetrain.errors import ConfigurationError

logger = logging.getLogger("drivetrain")


@dataclass(eq=False)
class ManualStep(TrainStep):
    """Runs ``training_step``, which runs backward and steps the optimizers itself.

    Attributes:
        handles: the optimizers that ``self.optimizers()`` returns.
    """

    handles: Sequence[OptimizerHandle]

    def __post_init__(self) -> None:
        super().__post_init__()
        strategy = self.strategy
        self.forward_backward = self.run_weightless = self._run
        self._weights_changed = strategy.precision.weights_changed
        self._outside_forward = strategy.precision.outside_forward if suspends_forward(strategy) else nullcontext
        self._backward_in_context = suspends_forward(strategy) or syncs_in_context(strategy)
        self._scale = 1.0
        self._toggled: AbstractContextManager[None] | None = None
        self._has_stepped = False
        self._compares_samples = strategy.world_size > 1 and strategy.rank == 0
        self._versions_at_start = self._sum_versions()

    @property
    def manual_step_missing(self) -> bool:
        handles = self.handles
        if not handles or self._has_stepped or any(handle.stepped is not None for handle in handles):
            return False
        # `training_step` may step the optimizers directly, without the handles.
        return self._sum_versions() == self._versions_at_start

    def _sum_versions(self) -> int:
        """Return the sum of the parameters' version counters, which an in-place update increments."""
        groups = [group for handle in self.handles for group in handle.optimizer.param_groups]
        return sum(parameter._version for group in groups for parameter in group["params"])

    def _run(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        trainables, strategy = self.trainables, self.strategy
        if trainables.checks_each_window:
            if trainables.has_changed():
                trainables.adapt_strategy()
            trainables.window_open = True
        if self._compares_samples and micro_batch.samples * micro_batch.ranks != micro_batch.total:
            self._warn_of_uneven_samples(micro_batch)
        # The strategy averages gradients over all ranks. The scale corrects the mean for the ranks without data.
        self._scale = strategy.data_world_size / micro_batch.ranks
        for handle in self.handles:
            handle.stepped = None
            handle.share = 0.0 if micro_batch.joins else self._scale
        try:
            if micro_batch.joins:
                with without_side_effects(self.module, self.metrics), strategy.zeroed_gradients():
                    output = self._training_step(micro_batch.batch, batch_idx)
            else:
                output = self._training_step(micro_batch.batch, batch_idx)
        except BaseException:
            self.untoggle()  # restores requires_grad, since the module may be used after the failed run
            raise
        if self._toggled is not None:
            self._raise_open_toggle("ended")
        if trainables.checks_each_window:
            if trainables.has_changed():
                trainables.raise_if_changed()
            trainables.window_open = False
        return {} if output is None else output

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; called by ``self.manual_backward``."""
        for hook in self._before_backward:
            hook(loss)
        trainables = self.trainables
        if trainables.window_open and trainables.has_changed():
            trainables.raise_if_changed(unfrozen_only=True)
        self.last_loss = loss.detach()
        loss = loss if self._scale == 1.0 else loss * self._scale
        if self._backward_in_context:
            with self._outside_forward(), self.strategy.gradient_sync(True):
                self.run_backward(loss)
        else:
            self.run_backward(loss)
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
            self.strategy.rank,
            micro_batch.samples,
            micro_batch.total,
            micro_batch.ranks,
        )

    def toggle(self, optimizer: Any) -> None:
        """Disable the gradients of parameters that ``optimizer`` does not hold; called by ``self.toggle_optimizer``."""
        if self._toggled is not None:
            self._raise_open_toggle("toggled a second optimizer")
        context = self.strategy.requiring_grad_only_for(optimizer)
        context.__enter__()
        self._toggled = context

    def untoggle(self) -> None:
        """Undo `toggle`; called by ``self.untoggle_optimizer``."""
        if self._toggled is not None:
            context, self._toggled = self._toggled, None
            context.__exit__(None, None, None)

    def _raise_open_toggle(self, event: str) -> None:
        self.untoggle()
        raise ConfigurationError(
            f"{type(self.module).__name__}.training_step {event} while an optimizer was toggled.",
            "the parameters of the other optimizers would no longer train.",
            "call self.untoggle_optimizer first, or write 'with self.toggled_optimizer(optimizer):'.",
        )

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        if any(handle.stepped is not None for handle in self.handles):
            self._has_stepped = True
            if self._scales_loss:
                self.strategy.precision.keep_pending_gradients([handle.optimizer for handle in self.handles])
            self.strategy.finish_step()
        return True
