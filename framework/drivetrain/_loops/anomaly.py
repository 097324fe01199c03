"""``Fit(detect_anomaly=True)``: reports where autograd found NaN, or where a loss is not finite."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain._loops.step import TrainStep
from drivetrain._loops.windows import MicroBatch
from drivetrain._run_state import Progress
from drivetrain.errors import NonFiniteError

_AUTOGRAD_MESSAGE = "returned nan values"  # a part of the message of autograd's error, which names the operation


class AnomalyStep:
    """Wraps another training step and raises `NonFiniteError` if its loss is not finite or autograd computes NaN.

    Every step waits for the device, since the loss is read.

    Args:
        step: the step to wrap.
        progress: the counters, for the error's message.
        rank: this process's rank.
    """

    def __init__(self, step: TrainStep, progress: Progress, rank: int) -> None:
        self._step = step
        self._progress = progress
        self._rank = rank

    @property
    def last_loss(self) -> torch.Tensor | None:
        return self._step.last_loss

    @property
    def manual_step_missing(self) -> bool:
        return self._step.manual_step_missing

    def zero_grad(self) -> None:
        self._step.zero_grad()

    def forward_backward(self, micro_batch: MicroBatch, batch_idx: int) -> Any:
        try:
            output = self._step.forward_backward(micro_batch, batch_idx)
        except RuntimeError as error:
            if _AUTOGRAD_MESSAGE not in str(error):
                raise
            raise self._error(str(error).splitlines()[0].rstrip("."), batch_idx) from error
        loss = output.get("loss") if isinstance(output, dict) else output
        # A micro-batch of weight 0 is empty, and its loss is not used.
        if micro_batch.weight and isinstance(loss, torch.Tensor) and not bool(loss.isfinite().all()):
            raise self._error(f"The loss is {loss.item()}", batch_idx)
        return output

    def clip_and_step(self, micro_batch: MicroBatch) -> bool:
        return self._step.clip_and_step(micro_batch)

    def drop_window(self) -> None:
        self._step.drop_window()

    def release(self) -> None:
        self._step.release()

    def _error(self, problem: str, batch_idx: int) -> NonFiniteError:
        progress = self._progress
        return NonFiniteError(
            f"{problem} on rank {self._rank} at batch index {batch_idx} of epoch {progress.epoch}, after "
            f"{progress.global_step} optimizer steps (global_step={progress.global_step})",
            "the weights become non-finite with the next optimizer step",
            "check that batch and the operation that the traceback names; lower the learning rate, clip gradients "
            "(gradient_clip_val) or use a wider precision",
        )
