"""LossSpikeGuard: detects spikes of the loss, and warns, skips the step or rolls back to a checkpoint."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain._metrics.packing import Readback
from drivetrain.callback import Callback, KeepsCheckpoints
from drivetrain.errors import ConfigurationError, LossSpikeError
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_ACTIONS = ("warn", "skip", "rollback")
_MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation divided by its MAD
_MIN_DEVIATION = 0.01  # lower bound of the deviation, as a fraction of the median
_CAPACITY = 1024  # losses in the buffer, and thus the maximum number of micro-batches between two checks


class _MicroBatch(NamedTuple):
    """A micro-batch of training.

    Attributes:
        step: the `global_step` before the optimizer step to which the micro-batch belongs.
        weight: the number of items over which the loss of the micro-batch is a mean.
    """

    step: int
    weight: float


class _PendingLosses(NamedTuple):
    """Losses of several micro-batches that are being copied to the host."""

    micro_batches: list[_MicroBatch]
    losses: Readback | None  # None if this rank had no loss

    @property
    def has_arrived(self) -> bool:
        return self.losses is None or self.losses.has_arrived

    def rows(self) -> list[list[float]]:
        """Return each micro-batch's loss on this rank and 1, or zeros if the loss does not count."""
        losses = [0.0] * len(self.micro_batches) if self.losses is None else self.losses.numbers()
        counts = [float(self.losses is not None and micro_batch.weight > 0) for micro_batch in self.micro_batches]
        return [[loss, count] if count else [0.0, 0.0] for loss, count in zip(losses, counts, strict=True)]


@dataclass(eq=False, repr=False)
class LossSpikeGuard(Callback):
    """Watches the loss of every step (the mean over its micro-batches and all ranks) for sudden rises.

    A loss is a spike if it is more than ``threshold`` robust standard deviations (1.4826 times the median absolute
    deviation) above the median of the last ``window`` steps, or if it is not finite.
    Losses are collected in a small buffer on the device. The host reads the buffer, and communicates with the other
    ranks, only every ``every_n_steps`` steps, before a validation and at the end of an epoch. All ranks take the same
    decision.

    Actions:
        "warn": log a warning. Within an epoch the host never waits for a GPU. Losses that have not arrived are checked
            at the next check.
        "skip": drop the gradients of a step whose loss is a spike. The step still counts. With this action, **every
            step** waits for the device and the other ranks.
        "rollback": load the newest checkpoint of this run's `Checkpoint` callbacks from before the spike and continue
            from there. When the run reaches the steps with the spike again, it computes their micro-batches but drops
            the gradients, because the same spike would occur again otherwise. A run rolls back at most
            ``max_rollbacks`` times. Each check waits for the device.

    Set the intervals of `Checkpoint` to multiples of ``every_n_steps``. Otherwise checkpoints may be saved before the
    losses of the steps before them were checked.

    Args:
        action: "warn", "skip" or "rollback".
        threshold: the number of robust standard deviations above the median beyond which a loss is a spike.
        window: the number of steps that define the normal loss.
        warmup: steps to observe before a finite loss can be a spike.
        every_n_steps: optimizer steps between two checks.
        max_rollbacks: the number of rollbacks after which another spike raises `LossSpikeError`.

    Raises:
        ConfigurationError: an argument is invalid; at the start of the run, if "skip" or "rollback" is used where steps
            cannot be skipped (DeepSpeed, manual optimization), or "rollback" without a `Checkpoint`.
        LossSpikeError: on every rank, at a spike after ``max_rollbacks`` rollbacks, or if there is no checkpoint from
            before the spike.
    """

    priority = 90  # after NonFiniteGuard, before callbacks that save or decide

    _key_arguments = ("action",)

    action: str = "warn"
    threshold: float = 10.0
    window: int = 200
    warmup: int = 50
    every_n_steps: int = 10
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        check_types(LossSpikeGuard, vars(self))
        check_choice("LossSpikeGuard", "action", self.action, _ACTIONS, "what to do at a spike")
        for name in ("window", "warmup", "every_n_steps"):
            check_count("LossSpikeGuard", name, getattr(self, name), 1, "a number of steps")
        if self.threshold <= 0 or self.warmup > self.window:
            raise ConfigurationError(
                f"LossSpikeGuard(threshold={self.threshold!r}, window={self.window}, warmup={self.warmup})",
                "either no loss or almost every loss would be a spike",
                "give a threshold above 0, and a warmup that is no longer than the window",
            )
        self.rollbacks = 0
        """Number of rollbacks so far."""
        self.skipped_steps: set[int] = set()
        """Steps to skip after a rollback. Each is given as the `global_step` before the step."""
        self._statistic = SpikeStatistic(self.threshold, self.window, self.warmup)
        self._losses: Tensor | None = None
        self._micro_batches: list[_MicroBatch] = []
        self._pending: list[_PendingLosses] = []  # losses that have not arrived on every rank
        self._step = 0  # global_step at the start of the current micro-batch
        self._drop_step: bool | None = None  # whether to drop the current step; None if not decided yet

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses, the number of rollbacks and the steps to skip."""
        return {
            "losses": self._statistic.state_dict(),
            "rollbacks": self.rollbacks,
            "skipped_steps": sorted(self.skipped_steps),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the recent losses. Later rollbacks still count, and the steps that they skip are still skipped."""
        self._statistic.load_state_dict(state_dict["losses"])
        self.rollbacks = max(self.rollbacks, state_dict["rollbacks"])
        self.skipped_steps |= set(state_dict["skipped_steps"])

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Check that steps can be skipped, if necessary, and reset the buffers."""
        if self.action != "warn":
            self._check_can_skip(trainer, module)
        self._losses, self._micro_batches, self._pending, self._drop_step = None, [], [], None
        self._step = trainer.global_step

    def on_before_backward(self, trainer: RunContext, module: TrainModule, loss: Tensor) -> None:
        """Add the loss to the buffer on its device."""
        self._step = trainer.global_step
        if self._losses is None:
            # A sum of losses in half precision could overflow.
            dtype = torch.float32 if loss.device.type == "mps" else torch.float64
            self._losses = torch.zeros(_CAPACITY, dtype=dtype, device=loss.device)
        self._losses[len(self._micro_batches)].add_(loss.detach())

    def on_before_optimizer_step(self, trainer: RunContext, module: TrainModule, optimizer: Optimizer) -> None:
        """Drop the gradients if the step is to be skipped."""
        if self.action == "warn":
            return
        if self._drop_step is None:
            self._drop_step = self._should_drop(trainer)
        if self._drop_step:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the micro-batch, and check the losses if ``every_n_steps`` is reached or the buffer is full."""
        self._drop_step = None
        self._micro_batches.append(_MicroBatch(self._step, trainer.micro_batch_weight))
        step = trainer.global_step
        stepped, self._step = step != self._step, step
        if (stepped and step % self.every_n_steps == 0) or len(self._micro_batches) == _CAPACITY:
            self._check_losses(trainer, wait=self.action != "warn")

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Check the losses before a checkpoint may be saved."""
        self._check_losses(trainer)

    on_train_epoch_end = on_validation_start

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_losses": None, "_micro_batches": [], "_pending": []}

    # Check the losses, and act on spikes

    def _check_losses(self, trainer: RunContext, wait: bool = True) -> None:
        if self._micro_batches:
            self._pending.append(_PendingLosses(self._micro_batches, self._read_losses()))
            self._micro_batches = []
        if not self._pending:
            return
        means = self._means(trainer, wait)
        spikes: dict[int, float] = {}
        normal_range = ""
        for step, loss in means.items():
            if self._statistic.is_spike(loss) and step not in self.skipped_steps:
                normal_range = normal_range or self._normal_range()  # before the statistic contains any of the spikes
                spikes[step] = loss
            self._statistic.add(loss)
        if not spikes or self.action == "skip":  # skipped steps have been logged already
            return
        first = min(spikes)
        description = f"The loss rose to {spikes[first]:.4g} in the step after global_step={first} ({normal_range})"
        if self.action == "warn":
            self._warn(
                trainer, f"LossSpikeGuard: {description}; {len(spikes)} of the last {len(means)} steps were spikes."
            )
        else:
            self._roll_back(trainer, description, spikes)

    def _read_losses(self) -> Readback | None:
        """Start to copy the recorded losses to the host, and clear the buffer."""
        if self._losses is None:
            return None
        losses = Readback(self._losses[: len(self._micro_batches)])
        self._losses.zero_()
        return losses

    def _means(self, trainer: RunContext, wait: bool) -> dict[int, float]:
        """Return the mean loss of each step over its micro-batches and all ranks, by the `global_step` before the step.

        A collective operation. Losses that have not arrived on some rank stay in the queue, unless ``wait`` is set.
        """
        pending = self._pending
        arrived = len(pending) if wait else sum(1 for _ in takewhile(lambda losses: losses.has_arrived, pending))
        rows = [row for losses in pending[:arrived] for row in losses.rows()]
        missing = sum(len(losses.micro_batches) for losses in pending) - len(rows)
        local = torch.tensor([[float(arrived), 0.0], *rows, *([[0.0, 0.0]] * missing)], dtype=torch.float64)
        gathered = trainer.strategy.control.all_gather(local)  # every rank has the same micro-batches
        arrived_everywhere = int(gathered[:, 0, 0].min())
        self._pending = pending[arrived_everywhere:]
        micro_batches = [micro_batch for losses in pending[:arrived_everywhere] for micro_batch in losses.micro_batches]
        sums: dict[int, list[float]] = {}
        for micro_batch, (loss, count) in zip(micro_batches, gathered[:, 1:].sum(0).tolist(), strict=False):
            total = sums.setdefault(micro_batch.step, [0.0, 0.0])
            total[0], total[1] = total[0] + loss, total[1] + count
        return {step: loss / count for step, (loss, count) in sums.items() if count}

    def _should_drop(self, trainer: RunContext) -> bool:
        """Return whether to skip the next step, the same on every rank.

        A collective operation with action "skip".
        """
        if self.action == "rollback":
            return self._step in self.skipped_steps
        assert self._losses is not None
        weights = [micro_batch.weight for micro_batch in self._micro_batches if micro_batch.step == self._step] + [
            trainer.micro_batch_weight
        ]
        losses = self._losses[len(self._micro_batches) + 1 - len(weights) : len(self._micro_batches) + 1].tolist()
        counted = [loss for loss, weight in zip(losses, weights, strict=True) if weight > 0]
        local = torch.tensor([sum(counted), float(len(counted))], dtype=torch.float64)
        total, count = trainer.strategy.control.all_gather(local).sum(0).tolist()
        loss = total / count if count else 0.0
        if not self._statistic.is_spike(loss):
            return False
        self._warn(
            trainer,
            f"LossSpikeGuard: skipped the step after global_step={self._step}, whose loss was {loss:.4g} "
            f"({self._normal_range()}).",
        )
        return True

    def _normal_range(self) -> str:
        return f"median {self._statistic.median:.4g}, limit {self._statistic.limit:.4g}"

    def _roll_back(self, trainer: RunContext, description: str, spikes: Iterable[int]) -> None:
        first, last = min(spikes), max(spikes)
        if self.rollbacks >= self.max_rollbacks:
            raise LossSpikeError(
                f"{description}.",
                f"the run has rolled back {self.rollbacks} time(s) already, which is the limit (max_rollbacks)",
                "lower the learning rate, clip gradients (gradient_clip_val), inspect that step's data, or raise "
                "max_rollbacks",
            )
        checkpoint = trainer.checkpoint_before(first)
        if checkpoint is None:
            raise LossSpikeError(
                f"{description}.",
                "there is no complete checkpoint from before the spike to roll back to",
                "save more often, at multiples of every_n_steps, and keep several checkpoints: "
                "Checkpoint(every_n_train_steps=..., keep_last=2)",
            )
        path, step = checkpoint
        self.rollbacks += 1
        self.skipped_steps |= set(range(first, last + 1))
        self._warn(
            trainer,
            f"LossSpikeGuard: {description}. Rolling back from global_step={trainer.global_step} to {step}, {path} "
            f"(rollback {self.rollbacks} of {self.max_rollbacks}); steps {first} to {last} will be skipped.",
        )
        trainer.roll_back(path)

    def _warn(self, trainer: RunContext, message: str) -> None:
        if trainer.strategy.rank == 0:
            logger.warning(message)

    def _check_can_skip(self, trainer: RunContext, module: TrainModule) -> None:
        if not trainer.strategy.accepts_none_loss:
            reason = f"strategy {trainer.strategy.name!r} does not expose its gradients, so steps cannot be skipped"
        elif not module.automatic_optimization:
            reason = "in manual optimization training_step itself steps the optimizers"
        elif self.action == "rollback" and not any(
            isinstance(callback, KeepsCheckpoints) and callback.saves_resumable for callback in trainer.callbacks
        ):
            reason = "there is no Checkpoint callback that saves checkpoints to roll back to"
        else:
            return
        raise ConfigurationError(
            f"LossSpikeGuard(action={self.action!r})",
            reason,
            "use action='warn', or for 'rollback' add Checkpoint(every_n_train_steps=..., keep_last=2)",
        )


class SpikeStatistic:
    """Detects loss spikes from the losses of the last ``window`` steps.

    Spikes hardly affect the median and the MAD as long as fewer than half of the values are spikes. A higher loss that
    lasts for half a window is no longer a spike. The robust standard deviation is the MAD times 1.4826, but at least 1%
    of the median.

    Args:
        threshold: the number of robust standard deviations above the median beyond which a loss is a spike.
        window: the number of steps to remember.
        warmup: the number of steps to observe before a finite loss can be a spike.
    """

    def __init__(self, threshold: float, window: int, warmup: int) -> None:
        self._threshold = threshold
        self._warmup = warmup
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def median(self) -> float:
        """The median of the losses in the window; NaN before the first loss."""
        return statistics.median(self._losses) if self._losses else math.nan

    @property
    def limit(self) -> float:
        """The largest loss that is not a spike; infinite during warm-up."""
        if len(self._losses) < self._warmup:
            return math.inf
        median = self.median
        deviation = _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in self._losses)
        return median + self._threshold * max(deviation, _MIN_DEVIATION * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Return whether the next step's loss is a spike. NaN and infinity are always spikes."""
        return not math.isfinite(loss) or loss > self.limit

    def add(self, loss: float) -> None:
        """Add a step's loss to the window, even if the loss is a spike. Non-finite losses are ignored."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state_dict(self) -> list[float]:
        """Return the losses in the window."""
        return list(self._losses)

    def load_state_dict(self, losses: Iterable[float]) -> None:
        """Restore the losses that `state_dict` returned."""
        self._losses = deque(losses, maxlen=self._losses.maxlen)
