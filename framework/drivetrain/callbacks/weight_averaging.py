"""WeightAveraging and EMAWeightAveraging: averages of the weights beside training, under every strategy."""

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

from drivetrain.callback import Callback
from drivetrain.callbacks._averages import Averages, regions_of_averages
from drivetrain.errors import ConfigurationError
from drivetrain.strategies._trainable import REQUIRES_GRAD

if TYPE_CHECKING:
    from drivetrain._distributed.shards import Region
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

AverageFn = Callable[[Tensor, Tensor, int], Tensor]


class WeightAveraging(Callback):
    """Keeps an average of the weights, validates with it, and leaves it in the module after `fit`.

    Each rank averages what it holds, in float32 at least: its replica under DDP, its shards under FSDP, its part of the
    float32 masters under ZeRO. Nothing is gathered. The averages of trainable parameters alone take memory, those of
    buffers too. In a checkpoint they lie beside the weights, in parts like these, and a run goes on from them
    under any strategy and world size.

    Within `fit` validation runs on the averages, once there are any, and training goes on from its own weights, which
    are put back bit for bit. After `fit` the module holds the averages; checkpoints written until then hold both.
    Subclasses say by `should_update` when the weights are taken into the average.

    Args:
        avg_fn: returns the new average of ``(average, weight, updates so far)``, tensors of one shape; None for the
            mean over all updates. The first update copies.
        use_buffers: average floating-point buffers like weights; else the averages go with the buffers as they are.
        evaluate: validate on the averages within `fit`.
    """

    priority = -5  # it sees what hooks of the module change, and comes before whatever stops or saves

    def __init__(self, avg_fn: AverageFn | None = None, use_buffers: bool = True, evaluate: bool = True) -> None:
        if avg_fn is not None and not callable(avg_fn):
            raise ConfigurationError(
                f"{type(self).__name__}(avg_fn={avg_fn!r})",
                "it is called with the average, the weight and how many updates there were",
                "give a function, such as torch.optim.swa_utils.get_ema_avg_fn(0.999)",
            )
        self.avg_fn = avg_fn
        self.use_buffers = use_buffers
        self.evaluate = evaluate
        self.updates = 0
        """How often the weights have been taken into the average."""
        self._averages: Averages | None = None
        self._step = 0
        self._parameters: list[Any] = []
        self._trained: tuple[bool, ...] = ()
        self._registered = False
        self._handles: list[Any] = []

    # What subclasses may say

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to take the weights into the average; alike on every rank.

        Args:
            step_idx: the optimizer step that was just made, counted from 0; None at the end of an epoch.
            epoch_idx: the epoch that has just ended, counted from 0; None after a step.
        """
        return step_idx is not None

    def average(self, averages: list[Tensor], weights: list[Tensor], updates: int) -> None:
        """Move ``averages``, in place, towards ``weights``: lists of tensors of one dtype and device."""
        if self.avg_fn is None:
            torch._foreach_lerp_(averages, weights, 1 / (updates + 1))
            return
        for one, weight in zip(averages, weights, strict=True):
            one.copy_(self.avg_fn(one, weight, updates))

    # In a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """How many updates the averages have had; they themselves are in `save_tensors`."""
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Know how many there were."""
        self.updates = int(state_dict["updates"])

    def save_tensors(self, trainer: RunContext, module: Any) -> Mapping[str, Any]:
        """The averages, by the weights' names."""
        return {} if self._averages is None or self.updates == 0 else self._averages.state()

    def tensor_regions(self, trainer: RunContext, module: Any) -> Mapping[str, Region]:
        """As this rank holds the weights."""
        return regions_of_averages(trainer.strategy)

    def load_tensors(self, trainer: RunContext, module: Any, tensors: Mapping[str, Any]) -> None:
        """Go on with these averages."""
        self._averages = Averages(trainer.strategy, module, self.use_buffers)
        self._averages.load(tensors)

    # The run

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Begin with no average, unless a checkpoint is loaded."""
        if stage != "fit":
            return
        averaging = [type(one).__name__ for one in trainer.callbacks if isinstance(one, WeightAveraging)]
        if len(averaging) > 1:
            raise ConfigurationError(
                f"{' and '.join(averaging)} in one run.",
                "each would put its average in the module, for validation and after fit",
                "keep one of them",
            )
        self.updates, self._averages = 0, None

    def on_fit_start(self, trainer: RunContext, module: Any) -> None:
        """Look at what there is to average."""
        if self._averages is None:
            self._averages = Averages(trainer.strategy, module, self.use_buffers)
        self._step = trainer.global_step
        for register in (register_module_module_registration_hook, register_module_parameter_registration_hook):
            self._handles.append(register(self._note_registration))
        self._registered = True
        self._follow(trainer)

    def on_train_batch_start(self, trainer: RunContext, module: Any, batch: Any, batch_idx: int) -> None:
        """Notice what trains from this step on, before it changes."""
        if self._registered or tuple(map(REQUIRES_GRAD, self._parameters)) != self._trained:
            self._registered = True
            self._follow(trainer)

    def on_train_batch_end(
        self, trainer: RunContext, module: Any, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Take the weights into the average after a step that is one for it."""
        step = trainer.global_step
        if step != self._step:
            self._step = step
            if self.should_update(step_idx=step - 1):
                self._update()

    def on_train_epoch_end(self, trainer: RunContext, module: Any) -> None:
        """Take the weights into the average after an epoch that is one for it."""
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update()

    def on_validation_start(self, trainer: RunContext, module: Any) -> None:
        """Put the averages in the module."""
        if self.evaluate and self._averages is not None and self.updates:
            self._averages.exchange()

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        """Put the training's weights back."""
        self._restore()

    def on_train_end(self, trainer: RunContext, module: Any) -> None:
        """Leave the averages in the module."""
        if self._averages is None or not self.updates:
            return
        self._averages.exchange()
        if trainer.strategy.rank == 0:
            logger.info(
                "%s: the module holds the averages of %d updates; checkpoints of this run have the weights that were "
                "trained, too.",
                type(self).__name__,
                self.updates,
            )

    def before_going_back(self, trainer: RunContext, module: Any) -> None:
        """Know nothing of what came after the checkpoint."""
        self.updates = 0
        self._averages = Averages(trainer.strategy, module, self.use_buffers)

    def after_going_back(self, trainer: RunContext, module: Any, path: str) -> None:
        """Follow what trains there."""
        self._step = trainer.global_step
        self._registered = True

    def on_exception(self, trainer: RunContext, module: Any, exception: BaseException) -> None:
        """Put the training's weights back, should a validation have failed: they may be saved."""
        self._restore()

    def teardown(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Let go of the averages."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._parameters, self._averages = [], [], None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_averages": None, "_parameters": [], "_handles": []}

    def _note_registration(self, *_: Any) -> None:
        self._registered = True

    def _follow(self, trainer: RunContext) -> None:
        assert self._averages is not None
        self._averages.follow()
        self._parameters = list(trainer.strategy.named_parameters().values())
        self._trained = tuple(map(REQUIRES_GRAD, self._parameters))
        self._registered = False

    def _update(self) -> None:
        assert self._averages is not None
        self._averages.update(self.average, self.updates)
        self.updates += 1

    def _restore(self) -> None:
        if self._averages is not None and self._averages.in_place:
            self._averages.restore()


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: ``average = decay * average + (1 - decay) * weight``.

    It begins as a copy of the weights at the first update. What else there is to it is as in `WeightAveraging`.

    Args:
        decay: how much of the average stays at each update.
        update_every_n_steps: updates after the first optimizer step and after every n-th from there.
        update_starting_at_step: no update before this step, counted from 0.
        update_starting_at_epoch: no update before this epoch, counted from 0.
        use_buffers: average floating-point buffers like weights; else the averages go with the buffers as they are.
        evaluate: validate on the averages within `fit`.

    Raises:
        ConfigurationError: ``decay`` is not in [0, 1], or a count is below its least.
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
        if not 0 <= decay <= 1:
            raise ConfigurationError(
                f"EMAWeightAveraging(decay={decay!r})", "it is the part of the average that stays", "give 0.999, say"
            )
        counts = {
            "update_every_n_steps": (update_every_n_steps, 1),
            "update_starting_at_step": (update_starting_at_step, 0),
            "update_starting_at_epoch": (update_starting_at_epoch, 0),
        }
        for name, (value, least) in counts.items():
            if (value is not None or least) and (type(value) is not int or value < least):
                raise ConfigurationError(
                    f"EMAWeightAveraging({name}={value!r})", "it is a count", f"give {least} or more"
                )
        super().__init__(None, use_buffers, evaluate)
        self.decay = float(decay)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._epoch = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """After every n-th step from the step and the epoch on that were asked for."""
        return (
            step_idx is not None
            and step_idx % self.update_every_n_steps == 0
            and step_idx >= (self.update_starting_at_step or 0)
            and self._epoch >= (self.update_starting_at_epoch or 0)
        )

    def on_train_batch_end(
        self, trainer: RunContext, module: Any, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Take the weights into the average after a step that is one for it."""
        self._epoch = trainer.current_epoch
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def average(self, averages: list[Tensor], weights: list[Tensor], updates: int) -> None:
        """Move ``averages`` towards ``weights`` by what does not stay."""
        torch._foreach_lerp_(averages, weights, 1 - self.decay)
