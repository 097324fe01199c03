"""What only an epoch as a whole shows: a loss that is never finite, a training_step that never steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch

from drivetrain._loops.step import TrainStep
from drivetrain._loops.windows import MicroBatch
from drivetrain._metrics import MetricStore

logger = logging.getLogger("drivetrain")


class EpochWatch:
    """Looks after an epoch's first micro-batch and after its last, and makes no Python call for those between.

    Args:
        step: whose losses.
        metrics: what a manual ``training_step`` logs stands for its loss.
        module: the module's class, for what is said.
        tells: whether this rank says what is amiss.
        after_first: called once, after the first micro-batch that this run trains on.
    """

    def __init__(
        self, step: TrainStep, metrics: MetricStore, module: str, tells: bool, after_first: Callable[[], None]
    ) -> None:
        self._step = step
        self._metrics = metrics
        self._module = module
        self._tells = tells
        self._after_first: Callable[[], None] | None = after_first
        self._first: Mapping[str, Any] | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None  # a loss, and what it was before a validation
        self._said_loss = False
        self._said_steps = False

    def follow(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Return an epoch's micro-batches, after the first of which it is looked at."""
        self._first = None
        return chain(islice(micro_batches, 1), self._look(), micro_batches) if self._tells else micro_batches

    def before_validation(self) -> None:
        """Copy the last loss: it may be the epoch's last, and compiled steps of a validation may write over it."""
        loss = self._step.last_loss
        if self._tells and loss is not None:
            self._kept = loss, loss.detach().clone()

    def end(self, epoch: int) -> None:
        """Say what came of the epoch. Waits for the device."""
        if not self._tells:
            return
        if not self._said_loss:
            self._look_at_losses(epoch)
        if self._first is not None and self._step.never_steps and not self._said_steps:
            self._said_steps = True
            logger.warning(
                "%s.training_step went through epoch %d and called step() of none of self.optimizers(): in manual "
                "optimization nobody else does, and nothing was trained. Said once.",
                self._module,
                epoch,
            )

    def _look(self) -> Iterator[MicroBatch]:
        yield from ()
        self._first = self._copied_losses()
        if self._after_first is not None:
            call, self._after_first = self._after_first, None
            call()

    def _look_at_losses(self, epoch: int) -> None:
        last = self._losses()
        first = last if self._first is None else self._first
        for name, value in last.items():
            if name in first and not _is_finite(value) and not _is_finite(first[name]):
                self._said_loss = True
                logger.warning(
                    "In epoch %d %s was %s after the first micro-batch, and %s after the last: nothing is learnt "
                    "any more. Look at the data and lower the learning rate; NonFiniteGuard and detect_anomaly=True "
                    "stop at the first such value. Said once.",
                    epoch,
                    name,
                    float(first[name]),
                    float(value),
                )
                return

    def _copied_losses(self) -> dict[str, Any]:
        # Copies: a compiled step, or a hook, may write to the tensor again.
        return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in self._losses().items()}

    def _losses(self) -> dict[str, Any]:
        loss = self._step.last_loss
        if loss is not None:
            if self._kept is not None and self._kept[0] is loss:
                return {"the loss": self._kept[1]}
            return {"the loss": loss.detach()}
        entries = self._metrics.entries.values()
        # Other values may be infinite on purpose: the best so far, a perplexity.
        logged = (entry for entry in entries if entry.on_step and entry.last is not None)
        return {entry.name: entry.last for entry in logged if "loss" in entry.name.lower()}


def _is_finite(value: Any) -> bool:
    return bool(value.isfinite().all()) if isinstance(value, torch.Tensor) else math.isfinite(value)
