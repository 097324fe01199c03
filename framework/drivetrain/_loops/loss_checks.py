"""Checks of training: losses that are not finite, and epochs without an optimizer step."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._loops.step import RunMicroBatch, TrainStep
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore
from drivetrain._run_state import Progress
from drivetrain.errors import NonFiniteError

logger = logging.getLogger("drivetrain")


class EpochChecks:
    """Warns about an epoch whose loss is not finite after its first and its last micro-batch, or that made no step.

    Args:
        step: the training step, which has the last loss.
        metrics: the logged values, which include the loss under manual optimization.
        progress: the counters.
        warns: whether this rank checks losses and warns.
        after_first: called once, if this rank warns, after the first micro-batch of this run.
    """

    def __init__(
        self, step: TrainStep, metrics: MetricStore, progress: Progress, warns: bool, after_first: Callable[[], None]
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._progress = progress
        self.warns = warns
        self._after_first: Callable[[], None] | None = after_first
        self._steps_before: int | None = None  # global_step at the epoch's start; None in an epoch that was resumed
        self._first_losses: Mapping[str, Any] | None = None  # the losses after the epoch's first micro-batch
        # A loss and its copy. The reference is weak, because `TrainStep.release` has to free the loss.
        self._loss_before_validation: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._warned: set[str] = set()

    def begin_epoch(self, is_resumed: bool) -> None:
        """Begin an epoch, or go on in one that an earlier run began."""
        self._steps_before = None if is_resumed else self._progress.global_step
        self._first_losses = None

    def after_first_micro_batch(self) -> None:
        """Keep the losses of the first micro-batch of the epoch that this run trains on."""
        # The losses are copied, since a compiled step or a hook may overwrite the tensors.
        self._first_losses = {
            name: loss.clone() if isinstance(loss, torch.Tensor) else loss for name, loss in self._losses().items()
        }
        if self._after_first is not None:
            after_first, self._after_first = self._after_first, None
            after_first()

    def before_validation(self) -> None:
        """Copy the last loss, which compiled steps of a validation may overwrite before the epoch's end."""
        loss = self._step.last_loss
        if self.warns and loss is not None:
            self._loss_before_validation = weakref.ref(loss), loss.detach().clone()

    def check_steps(self) -> None:
        """Warn about an epoch without an optimizer step, once its data has ended."""
        if self.warns and self._steps_before == self._progress.global_step and self._is_first("no step"):
            logger.warning(
                "Training went through epoch %d without an optimizer step: in every window the losses were None, the "
                "weights zero or the fp16 gradients not finite, or a hook skipped the step. This warning is not "
                "repeated.",
                self._progress.epoch,
            )

    def end_epoch(self) -> None:
        """Warn about the losses of the epoch that ends, and about a missing manual step. Waits for the device."""
        if not self.warns:
            return
        self._check_losses()
        if self._first_losses is not None and self._step.manual_step_missing and self._is_first("no manual step"):
            logger.warning(
                "%s.training_step went through epoch %d and did not call step() of any of self.optimizers(). With "
                "manual optimization the engine does not step optimizers, so nothing was trained. This warning is not "
                "repeated.",
                type(self._step.module).__name__,
                self._progress.epoch,
            )

    def _is_first(self, warning: str) -> bool:
        is_first = warning not in self._warned
        self._warned.add(warning)
        return is_first

    def _check_losses(self) -> None:
        if "loss" in self._warned:
            return
        last = self._losses()
        first = last if self._first_losses is None else self._first_losses
        for name, value in last.items():
            if name in first and not _is_finite(value) and not _is_finite(first[name]) and self._is_first("loss"):
                logger.warning(
                    "In epoch %d %s was %s after the first micro-batch, and %s after the last: the module no longer "
                    "learns. Check the data and lower the learning rate; NonFiniteGuard and detect_anomaly=True "
                    "stop at the first such value. This warning is not repeated.",
                    self._progress.epoch,
                    name,
                    float(first[name]),
                    float(value),
                )

    def _losses(self) -> dict[str, Any]:
        loss = self._step.last_loss
        if loss is not None:
            if self._loss_before_validation is not None and self._loss_before_validation[0]() is loss:
                return {"the loss": self._loss_before_validation[1]}
            return {"the loss": loss.detach()}
        entries = self._metrics.entries.values()
        # Only losses are checked. Other values, such as a best value or a perplexity, may be infinite on purpose.
        logged = (entry for entry in entries if entry.on_step and entry.last is not None)
        return {entry.name: entry.last for entry in logged if "loss" in entry.name.lower()}


def _is_finite(value: Any) -> bool:
    return bool(value.isfinite().all()) if isinstance(value, torch.Tensor) else math.isfinite(value)


# ``Fit(detect_anomaly=True)``

_AUTOGRAD_MESSAGE = "returned nan values"  # a part of the message of autograd's error, which names the operation


def refusing_anomalies(run: RunMicroBatch, progress: Progress, rank: int) -> RunMicroBatch:
    """Return ``run`` with an error if the loss is not finite or autograd computes NaN: a `NonFiniteError`.

    Every step waits for the device, since the loss is read.

    Args:
        run: runs forward and backward on a micro-batch.
        progress: the counters, for the error's message.
        rank: this process's rank.
    """

    def error(problem: str, batch_idx: int) -> NonFiniteError:
        return NonFiniteError(
            f"{problem} on rank {rank} at batch index {batch_idx} of epoch {progress.epoch}, after "
            f"{progress.global_step} optimizer steps (global_step={progress.global_step})",
            "the weights become non-finite with the next optimizer step",
            "check that batch and the operation that the traceback names; lower the learning rate, clip gradients "
            "(gradient_clip_val) or use a wider precision",
        )

    def run_and_check(micro_batch: MicroBatch, batch_idx: int) -> Any:
        try:
            output = run(micro_batch, batch_idx)
        except RuntimeError as failure:
            if _AUTOGRAD_MESSAGE not in str(failure):
                raise
            raise error(str(failure).splitlines()[0].rstrip("."), batch_idx) from failure
        loss = output.get("loss") if isinstance(output, dict) else output
        # A micro-batch of weight 0 is empty, and its loss is not used.
        if micro_batch.weight and isinstance(loss, torch.Tensor) and not bool(loss.isfinite().all()):
            raise error(f"The loss is {loss.item()}", batch_idx)
        return output

    return run_and_check
