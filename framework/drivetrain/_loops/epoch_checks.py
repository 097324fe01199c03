"""Warns about problems that are visible only over a whole epoch: a loss that is never finite, no optimizer step."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._loops.step import TrainStep
from drivetrain._metrics import MetricStore

logger = logging.getLogger("drivetrain")


class EpochChecks:
    """Checks the loss after an epoch's first and last micro-batch.

    Args:
        step: the training step, which has the last loss.
        metrics: the logged values, which include the loss under manual optimization.
        module_name: the name of the module's class, for messages.
        warns: whether this rank checks and warns.
        after_first: a function that is called once, after the first micro-batch of this run.
    """

    def __init__(
        self, step: TrainStep, metrics: MetricStore, module_name: str, warns: bool, after_first: Callable[[], None]
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._module_name = module_name
        self._warns = warns
        self._after_first: Callable[[], None] | None = after_first
        self._first_losses: Mapping[str, Any] | None = None  # the losses after the epoch's first micro-batch
        # A loss and its copy. The reference is weak, because `TrainStep.release` has to free the loss.
        self._loss_before_validation: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._warned_of_loss = False
        self._warned_of_steps = False

    def begin_epoch(self) -> Callable[[], None] | None:
        """Return the check to call after the epoch's first micro-batch; None if this rank does not check."""
        self._first_losses = None
        return self._check_first if self._warns else None

    def before_validation(self) -> None:
        """Copy the last loss, which compiled steps of a validation may overwrite before the epoch's end."""
        loss = self._step.last_loss
        if self._warns and loss is not None:
            self._loss_before_validation = weakref.ref(loss), loss.detach().clone()

    def end(self, epoch: int) -> None:
        """Warn about problems in the epoch that ended. The call waits for the device."""
        if not self._warns:
            return
        if not self._warned_of_loss:
            self._check_losses(epoch)
        if self._first_losses is not None and self._step.manual_step_missing and not self._warned_of_steps:
            self._warned_of_steps = True
            logger.warning(
                "%s.training_step went through epoch %d and did not call step() of any of self.optimizers(). With "
                "manual optimization the engine does not step optimizers, so nothing was trained. This warning is not "
                "repeated.",
                self._module_name,
                epoch,
            )

    def _check_first(self) -> None:
        self._first_losses = self._copied_losses()
        if self._after_first is not None:
            after_first, self._after_first = self._after_first, None
            after_first()

    def _check_losses(self, epoch: int) -> None:
        last = self._losses()
        first = last if self._first_losses is None else self._first_losses
        for name, value in last.items():
            if name in first and not _is_finite(value) and not _is_finite(first[name]):
                self._warned_of_loss = True
                logger.warning(
                    "In epoch %d %s was %s after the first micro-batch, and %s after the last: the module no longer "
                    "learns. Check the data and lower the learning rate; NonFiniteGuard and detect_anomaly=True "
                    "stop at the first such value. This warning is not repeated.",
                    epoch,
                    name,
                    float(first[name]),
                    float(value),
                )
                return

    def _copied_losses(self) -> dict[str, Any]:
        # The losses are copied, since a compiled step or a hook may overwrite the tensors.
        return {name: loss.clone() if isinstance(loss, torch.Tensor) else loss for name, loss in self._losses().items()}

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
