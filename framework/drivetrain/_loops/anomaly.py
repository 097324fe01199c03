"""``Fit(detect_anomaly=True)``: what autograd found, and a loss that is not finite, with where it happened."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain._loops.progress import Progress
from drivetrain._loops.step import TrainStep
from drivetrain._loops.windows import MicroBatch
from drivetrain.errors import NonFiniteError

_FOUND = "returned nan values"  # in autograd's message, which names the operation


class AnomalyStep:
    """Watches another way of training. Reads every loss, so it waits for the device.

    Args:
        step: the way of training.
        progress: tells epoch and step.
        rank: this process's.
    """

    def __init__(self, step: TrainStep, progress: Progress, rank: int) -> None:
        self._step = step
        self._progress = progress
        self._rank = rank

    @property
    def last_loss(self) -> torch.Tensor | None:
        return self._step.last_loss

    @property
    def never_steps(self) -> bool:
        return self._step.never_steps

    def micro_batch(self, micro: MicroBatch, batch_idx: int) -> Any:
        try:
            output = self._step.micro_batch(micro, batch_idx)
        except RuntimeError as error:
            if _FOUND not in str(error):
                raise
            raise self._error(str(error).splitlines()[0].rstrip("."), batch_idx) from error
        loss = output.get("loss") if isinstance(output, dict) else output
        if micro.weight and isinstance(loss, torch.Tensor) and not bool(loss.isfinite().all()):
            raise self._error(f"The loss is {loss.item()}", batch_idx)
        return output

    def close_window(self, micro: MicroBatch) -> bool:
        return self._step.close_window(micro)

    def drop_window(self) -> None:
        self._step.drop_window()

    def _error(self, what: str, batch_idx: int) -> NonFiniteError:
        progress = self._progress
        return NonFiniteError(
            f"{what} on rank {self._rank} at batch index {batch_idx} of epoch {progress.epoch}, after "
            f"{progress.global_step} optimizer steps (global_step={progress.global_step})",
            "what follows from it is not a number either",
            "look at that batch and at the operation that the traceback names; lower the learning rate, clip gradients "
            "(gradient_clip_val) or use a wider precision",
        )
