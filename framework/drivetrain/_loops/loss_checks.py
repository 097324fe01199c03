"""Checks of training: losses that are not finite, and epochs without an optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from drivetrain._loops.step import RunMicroBatch, TrainStep
from drivetrain._loops.windows import MicroBatch
from drivetrain._run_state import Progress
from drivetrain.errors import NonFiniteError

logger = logging.getLogger("drivetrain")


class EpochChecks:
    """Warns about an epoch whose loss is not finite after its first and its last micro-batch, or that made no step.

    Args:
        step: the training step, which has the last loss.
        progress: the counters.
        warns: whether this rank checks losses and warns.
        after_first: called once, if this rank warns, after the first micro-batch of this run.
    """

    def __init__(self, step: TrainStep, progress: Progress, warns: bool, after_first: Callable[[], None]) -> None:
        self._step = step
        self._progress = progress
        self.warns = warns
        self._after_first: Callable[[], None] | None = after_first
        self._steps_before: int | None = None  # global_step at the epoch's start; None in an epoch that was resumed
        self._has_trained = False  # in this epoch
        self._first_loss: torch.Tensor | None = None
        # The last loss, and the number of micro-batches by then. Compiled steps of a validation may overwrite the loss.
        self._before_validation: tuple[int, torch.Tensor | None] = (-1, None)
        self._warned: set[str] = set()

    def begin_epoch(self, is_resumed: bool) -> None:
        """Begin an epoch, or go on in one that an earlier run began."""
        self._steps_before = None if is_resumed else self._progress.global_step
        self._has_trained, self._first_loss = False, None

    def after_first_micro_batch(self) -> None:
        """Keep the loss of the first micro-batch of the epoch that this run trains on."""
        self._has_trained, self._first_loss = True, self._copy_of_loss()
        if self._after_first is not None:
            after_first, self._after_first = self._after_first, None
            after_first()

    def before_validation(self) -> None:
        """Keep the last loss until the epoch's end."""
        if self.warns:
            self._before_validation = self._progress.micro_batches, self._copy_of_loss()

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
        """Warn about the loss in the epoch that ends, and about a missing manual step. Waits for the device."""
        if not self.warns:
            return
        kept_at, last = self._before_validation
        if kept_at != self._progress.micro_batches:
            last = self._step.last_loss
        first = last if self._first_loss is None else self._first_loss
        # A loss of manual optimization has elements where the module overrides `backward`.
        losses = [loss.sum() for loss in (first, last) if loss is not None]
        not_finite = [loss.item() for loss in losses if not loss.isfinite()]
        if len(not_finite) == 2 and self._is_first("loss"):
            logger.warning(
                "In epoch %d the loss was %s after the first micro-batch, and %s after the last: the module no longer "
                "learns. Check the data and lower the learning rate; NonFiniteGuard and detect_anomaly=True stop at "
                "the first such value. This warning is not repeated.",
                self._progress.epoch,
                *not_finite,
            )
        if self._has_trained and self._step.manual_step_missing and self._is_first("no manual step"):
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

    def _copy_of_loss(self) -> torch.Tensor | None:
        loss = self._step.last_loss
        return None if loss is None else loss.detach().clone()


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
