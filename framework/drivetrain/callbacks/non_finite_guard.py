"""NonFiniteGuard: stops the run at the first NaN or infinity and reports where it occurred."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from drivetrain._config.argument_checks import check_count
from drivetrain.callback import Callback
from drivetrain.errors import NonFiniteError
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_CAPACITY = 256  # losses in the buffer, and thus the maximum number of micro-batches between two checks


class _MicroBatch(NamedTuple):
    """The position of a micro-batch in the run."""

    epoch: int
    step: int
    batch_idx: int
    weight: float
    """Number of items over which the micro-batch's loss is a mean. If it is 0, the loss may be NaN and is ignored."""


@dataclass(eq=False, repr=False)
class NonFiniteGuard(Callback):
    """Raises `NonFiniteError` when a loss is NaN or infinite, naming the step, the rank and the batch.

    Losses are collected in a small buffer on the device. The host reads the buffer, which waits for the device and
    communicates with the other ranks, only every ``every_n_steps`` steps, before a validation and at the end of an
    epoch. The error is therefore raised up to ``every_n_steps`` steps late, on every rank at once, but names exactly
    the first micro-batch with a non-finite value. With ``every_n_steps=1`` the error is raised right after the step.
    The guard checks the losses that `training_step` returned or, in manual optimization, the losses passed to
    `manual_backward`.

    Args:
        every_n_steps: optimizer steps between two checks.

    Raises:
        ConfigurationError: ``every_n_steps`` is below 1.
        NonFiniteError: on every rank, if a loss on any rank is not finite.
    """

    priority = 100  # before callbacks that save or decide

    _key_arguments = ("every_n_steps",)

    every_n_steps: int = 50

    def __post_init__(self) -> None:
        meaning = "the number of optimizer steps between two checks"
        check_count("NonFiniteGuard", "every_n_steps", self.every_n_steps, 1, meaning)
        self._buffer: Tensor | None = None
        self._micro_batches: list[_MicroBatch] = []
        self._step = 0  # global_step at the start of the current micro-batch
        self._last_check = 0

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Reset the buffer."""
        self._buffer = None
        self._micro_batches = []
        self._step = self._last_check = trainer.global_step

    def on_before_backward(self, trainer: RunContext, module: TrainModule, loss: Tensor) -> None:
        """Add the loss to the buffer on its device."""
        if self._buffer is None:
            # A sum of losses in half precision could overflow.
            dtype = torch.float32 if loss.device.type == "mps" else torch.float64
            self._buffer = torch.zeros(_CAPACITY, dtype=dtype, device=loss.device)
        # Several losses of one micro-batch are summed, which preserves NaN and infinity.
        self._buffer[len(self._micro_batches)].add_(loss.detach())

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the micro-batch, and check the buffer if ``every_n_steps`` is reached or the buffer is full."""
        self._micro_batches.append(
            _MicroBatch(trainer.current_epoch, self._step, batch_idx, trainer.micro_batch_weight)
        )
        self._step = step = trainer.global_step
        if step - self._last_check >= self.every_n_steps or len(self._micro_batches) == _CAPACITY:
            self._check(trainer)

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Check the buffer before weights that are not finite are validated and possibly saved."""
        if self._micro_batches:
            self._check(trainer)

    on_train_epoch_end = on_train_end = on_validation_start  # training may end within an epoch

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_buffer": None, "_micro_batches": []}

    def _check(self, trainer: RunContext) -> None:
        """Raise an error if a loss of any rank is not finite. A collective operation."""
        micro_batches, self._micro_batches = self._micro_batches, []
        self._last_check = trainer.global_step
        local = torch.tensor(self._first_problem(micro_batches), dtype=torch.float64)
        gathered = trainer.strategy.control.all_gather(local).tolist()
        problems = [(int(index), rank, value) for rank, (index, value) in enumerate(gathered) if index >= 0]
        if not problems:
            return
        first, _, value = min(problems)
        epoch, step, batch_idx, _ = micro_batches[first]
        ranks = [str(rank) for index, rank, _ in problems if index == first]
        raise NonFiniteError(
            f"The loss is {value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} at batch index {batch_idx} "
            f"of epoch {epoch}, after {step} optimizer steps (global_step={step})",
            "training does not recover from non-finite values; the weights may already contain NaN",
            "inspect that batch, lower the learning rate, clip gradients (gradient_clip_val) or use a wider precision; "
            "Fit(detect_anomaly=True) names the operation that produced the value",
        )

    def _first_problem(self, micro_batches: list[_MicroBatch]) -> tuple[int, float]:
        """Return the index and value of this rank's first loss that is not finite, or (-1, 0), and clear the buffer."""
        if self._buffer is None:
            return -1, 0.0
        losses = self._buffer[: len(micro_batches)].tolist()
        self._buffer.zero_()
        for index, (loss, micro_batch) in enumerate(zip(losses, micro_batches, strict=True)):
            if not math.isfinite(loss) and micro_batch.weight > 0:
                return index, loss
        return -1, 0.0
