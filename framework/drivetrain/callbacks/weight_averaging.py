"""WeightAveraging and EMAWeightAveraging: average the weights during training, under every strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from drivetrain._config.argument_checks import check_count, check_types
from drivetrain.callback import Callback
from drivetrain.callbacks._averages import Averages
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

AverageFn = Callable[[Tensor, Tensor, int], Tensor]


class WeightAveraging(Callback):
    """Keeps an average of the weights, validates with it, and leaves it in the module after `fit`.

    Each rank averages its own part of the weights, in at least float32. This part is its replica under DDP, its
    shards under FSDP, and its partition of the float32 master weights under ZeRO. Nothing is gathered. Only trainable
    parameters, and buffers with ``use_buffers``, take additional memory. Checkpoints contain the averages in the same
    sharded form as the weights, so a run can resume with them under any strategy and world size.

    Within `fit`, each validation after the first update uses the averages, and afterwards the trained weights are
    restored bit for bit. After `fit` the module contains the averages. Checkpoints saved during `fit` contain the
    trained weights and the averages, and are tested, loaded and exported with those that validation used, unless
    ``averaged=`` says otherwise. Subclasses override `should_update` to choose when to update the averages, and
    `average` to choose how.

    Args:
        avg_fn: a function that returns the new average from ``(average, weight, updates so far)``, where the average
            and the weight are tensors of the same shape. None computes the mean over all updates. The first update
            copies the weights.
        use_buffers: whether to average running statistics (buffers called ``running_...``) too. Other buffers are used
            as they are.
        evaluate: whether validation within `fit` uses the averages.
    """

    priority = -5  # after the module's hooks, which may change weights, and before callbacks that stop or save
    _saved_attributes: tuple[str, ...] = ("updates", "_must_update", "_validated_at")

    def __init__(self, avg_fn: AverageFn | None = None, use_buffers: bool = True, evaluate: bool = True) -> None:
        check_types(WeightAveraging, locals())
        self.avg_fn = avg_fn
        self.use_buffers = use_buffers
        self.evaluate = evaluate
        self.updates = 0
        """Number of updates of the averages."""
        self._averages: Averages | None = None
        self._step = 0  # global_step when the last micro-batch ended
        self._epoch = 0  # the epoch of the last step
        self._validated_at: int | None = None  # global_step of the last validation with ``evaluate``
        self._must_update = False  # whether the update at an epoch's end is made before the next step
        self._handles: list[Any] = []

    # Methods that subclasses may override

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the averages now, the same on every rank. The default updates after every step.

        Args:
            step_idx: the optimizer step that was just made, counted from 0; None at the end of an epoch.
            epoch_idx: the epoch that has just ended, counted from 0; None after a step.
        """
        return step_idx is not None

    def average(self, averages: list[Tensor], weights: list[Tensor], updates: int) -> None:
        """Update ``averages`` in place with ``weights``: lists of tensors of one dtype and device.

        The default uses ``avg_fn``. This method is not called for the first update, which copies the weights.
        """
        if self.avg_fn is None:
            torch._foreach_lerp_(averages, weights, 1 / (updates + 1))
            return
        for average, weight in zip(averages, weights, strict=True):
            average.copy_(self.avg_fn(average, weight, updates))

    # State in checkpoints

    def save_tensors(self, trainer: RunContext, module: Any) -> Mapping[str, Any]:
        """Return the averages by the weights' names."""
        return {} if self._averages is None or self.updates == 0 else self._averages.state()

    @property
    def evaluates_averages(self) -> bool | None:
        """True if validation uses the averages or the module has them; False if not; None before the first update."""
        if self._averages is None or self.updates == 0:
            return None
        return self.evaluate or self._averages.swapped_in

    def trained_weights(self, trainer: RunContext, module: Any) -> Mapping[str, Any]:
        """Return the trained weights while the module has the averages."""
        return {} if self._averages is None else self._averages.trained_state()

    def load_tensors(self, trainer: RunContext, module: Any, tensors: Mapping[str, Any]) -> None:
        """Restore the averages."""
        self._averages = Averages(trainer.strategy, module, self.use_buffers)
        self._averages.load(tensors)

    # Hooks

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Check that no other callback averages weights, and reset the averages."""
        if stage != "fit":
            return
        averaging = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        if len(averaging) > 1:
            raise ConfigurationError(
                f"{' and '.join(averaging)} in one run.",
                "each callback would load its averages into the module, for validation and after fit",
                "keep one of them",
            )
        self.updates, self._averages = 0, None
        self._must_update, self._validated_at = False, None

    def on_fit_start(self, trainer: RunContext, module: Any) -> None:
        """Collect the weights to average, and watch for parameters that are registered later."""
        if self._averages is None:
            self._averages = Averages(trainer.strategy, module, self.use_buffers)
        self._step = trainer.global_step
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            self._handles.append(register(self._note_registration))
        self._averages.collect_weights()

    def on_train_batch_start(self, trainer: RunContext, module: Any, batch: Any, batch_idx: int) -> None:
        """Make the update of the last epoch's end, and collect the weights again if other parameters are trainable."""
        if self._must_update:
            self._update()
        if self._averages is not None and self._averages.must_collect():
            self._averages.collect_weights()

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Update the averages after a step, if `should_update`."""
        step = trainer.global_step
        if step != self._step:
            self._step, self._epoch = step, trainer.current_epoch
            if self.should_update(step_idx=step - 1):
                self._update()

    def on_train_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Update the averages, if `should_update` returns True.

        If the validation of this step used the averages, they are updated before the next step instead. Checkpoints
        that are saved at the end of the epoch then contain the averages to which the validation's values belong.
        """
        if self._must_update:
            self._update()  # that of an epoch before, after which no step was made
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._must_update = self._validated_at == trainer.global_step
            if not self._must_update:
                self._update()

    def on_validation_start(self, trainer: RunContext, module: Any) -> None:
        """Load the averages into the module, if ``evaluate`` is set."""
        if self.evaluate and self._averages is not None:
            if not trainer.sanity_checking:
                self._validated_at = trainer.global_step
            if self.updates:
                self._averages.swap_in()

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        """Restore the trained weights."""
        self._restore()

    def on_train_end(self, trainer: RunContext, module: Any) -> None:
        """Load the averages into the module."""
        if self._must_update:
            self._update()
        if self._averages is None or not self.updates:
            return
        self._averages.swap_in()
        if trainer.strategy.rank == 0:
            logger.info(
                "%s: the module now has the weights averaged over %d updates; checkpoints of this run also have the "
                "trained weights.",
                type(self).__name__,
                self.updates,
            )

    def before_rollback(self, trainer: RunContext, module: Any) -> None:
        """Reset the averages before those of the checkpoint are loaded."""
        self.updates, self._must_update, self._validated_at = 0, False, None
        self._averages = Averages(trainer.strategy, module, self.use_buffers)

    def after_rollback(self, trainer: RunContext, module: Any, path: str) -> None:
        """Count steps from the one that the run has rolled back to."""
        self._step = trainer.global_step

    def on_exception(self, trainer: RunContext, module: Any, exception: BaseException) -> None:
        """Restore the trained weights if a validation failed, because the failed run may save them."""
        self._restore()

    def teardown(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Free the averages."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._averages = [], None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_averages": None, "_handles": []}

    def _note_registration(self, *_: Any) -> None:
        if self._averages is not None:
            self._averages.has_new_parameters = True

    def _update(self) -> None:
        assert self._averages is not None
        self._averages.update(self.average, self.updates)
        self.updates += 1
        self._must_update = False

    def _restore(self) -> None:
        if self._averages is not None and self._averages.swapped_in:
            self._averages.swap_out()


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weight``.

    The first update copies the weights. For everything else, see `WeightAveraging`.

    Args:
        decay: the fraction of the average that is kept at each update.
        update_every_n_steps: update the averages after every n-th step, starting with step 0.
        update_starting_at_step: the first step, counted from 0, after which to update the averages.
        update_starting_at_epoch: the first epoch, counted from 0, in which to update the averages.
        use_buffers: whether to average running statistics (buffers called ``running_...``) too. Other buffers are used
            as they are.
        evaluate: whether validation within `fit` uses the averages.

    Raises:
        ConfigurationError: ``decay`` is not in [0, 1], or another number is too small.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        use_buffers: bool = True,
        evaluate: bool = True,
    ) -> None:
        check_types(EMAWeightAveraging, locals())
        if not 0 <= decay <= 1:
            raise ConfigurationError(
                f"EMAWeightAveraging(decay={decay!r})",
                "decay is the fraction of the average that is kept at each update",
                "give a number from 0 to 1, such as 0.999",
            )
        owner, meaning = "EMAWeightAveraging", "a number of steps or epochs"
        check_count(owner, "update_every_n_steps", update_every_n_steps, 1, meaning)
        check_count(owner, "update_starting_at_step", update_starting_at_step or 0, 0, meaning)
        check_count(owner, "update_starting_at_epoch", update_starting_at_epoch or 0, 0, meaning)
        super().__init__(None, use_buffers, evaluate)
        self.decay = float(decay)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True after every n-th step, from the given step and epoch on."""
        return (
            step_idx is not None
            and step_idx % self.update_every_n_steps == 0
            and step_idx >= (self.update_starting_at_step or 0)
            and self._epoch >= (self.update_starting_at_epoch or 0)
        )

    def average(self, averages: list[Tensor], weights: list[Tensor], updates: int) -> None:
        """Update ``averages`` in place: ``average += (1 - decay) * (weight - average)``."""
        torch._foreach_lerp_(averages, weights, 1 - self.decay)
