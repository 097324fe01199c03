"""LossSpikeGuard: notice that the loss jumps, and warn, pass over the step, or go back to the last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain._metrics.packing import Readback
from drivetrain.callback import Callback
from drivetrain.callbacks._spike_statistic import SpikeStatistic
from drivetrain.errors import ConfigurationError, LossSpikeError, nearest
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_ACTIONS = ("warn", "skip", "rollback")
_CAPACITY = 1024  # micro-batches between two looks at most, whatever the window


class _Mark(NamedTuple):
    """Which step a micro-batch was part of, and over how many items its loss is a mean."""

    step: int
    weight: float


class _Look(NamedTuple):
    """The losses of some micro-batches, on their way to the host."""

    marks: list[_Mark]
    losses: Readback | None  # None where this rank had no loss

    def has_arrived(self) -> bool:
        return self.losses is None or self.losses.has_arrived

    def no_sums(self) -> dict[int, list[float]]:
        return {mark.step: [0.0, 0.0] for mark in self.marks}

    def sums(self) -> dict[int, list[float]]:
        """By step, the sum of the losses of its micro-batches on this rank, and how many those are."""
        sums = self.no_sums()
        for mark, loss in zip(self.marks, self.losses.numbers(), strict=True) if self.losses is not None else ():
            if mark.weight > 0:
                sums[mark.step][0] += loss
                sums[mark.step][1] += 1
        return sums


class LossSpikeGuard(Callback):
    """Watches the loss of every step, its mean over all micro-batches and ranks, for a sudden rise.

    A spike is a loss more than ``threshold`` robust standard deviations above the median of the last ``window`` steps,
    or one that is not finite. Losses stay in a small buffer on their device; the host reads it every ``every_n_steps``
    steps, before a validation and at an epoch's end, and only then talks to the other ranks. All ranks decide alike.

    Actions:
        "warn": say so. The host never waits for a GPU within an epoch: what has not come over is looked at the next
            time.
        "skip": make no step from such a loss: its gradients are dropped, the step still counts. To know in time,
            **every step** waits for the device and for the other ranks.
        "rollback": go back to the newest checkpoint of this run's `Checkpoint` callbacks from before the spike, and
            train on from there without the steps in which it was seen: their micro-batches are run, and their
            gradients dropped. A run that went on exactly as before would meet the same spike. At most
            ``max_rollbacks`` times. Each look waits for the device.

    Checkpoints are only written of what was looked at where their interval is a multiple of ``every_n_steps``.

    Args:
        action: what to do.
        threshold: in robust standard deviations.
        window: steps that make up what is normal.
        warmup: steps before which nothing but NaN and infinity counts as a spike.
        every_n_steps: optimizer steps between two looks.
        max_rollbacks: after so many a further spike raises.

    Raises:
        ConfigurationError: an argument is wrong; at the run's start, "skip" or "rollback" where steps cannot be passed
            over (DeepSpeed, manual optimization), or "rollback" without a `Checkpoint`.
        LossSpikeError: on every rank, at a spike after the last rollback, or one that no checkpoint lies before.
    """

    priority = 90  # before anything is saved or decided from it, and after NonFiniteGuard

    def __init__(
        self,
        action: str = "warn",
        threshold: float = 10.0,
        window: int = 200,
        warmup: int = 50,
        every_n_steps: int = 10,
        max_rollbacks: int = 3,
    ) -> None:
        if action not in _ACTIONS:
            raise ConfigurationError(
                f"LossSpikeGuard(action={action!r}).{nearest(str(action), _ACTIONS)}",
                "it says what becomes of a spike",
                f"give one of {', '.join(_ACTIONS)}",
            )
        for name, value in {"window": window, "warmup": warmup, "every_n_steps": every_n_steps}.items():
            if type(value) is not int or value < 1:
                raise ConfigurationError(
                    f"LossSpikeGuard({name}={value!r})", "it is a number of steps", "give 1 or more"
                )
        if threshold <= 0 or warmup > window:
            raise ConfigurationError(
                f"LossSpikeGuard(threshold={threshold!r}, window={window}, warmup={warmup})",
                "nothing, or everything, would be a spike",
                "give a threshold above 0, and a warmup that is no longer than the window",
            )
        self.action = action
        self.every_n_steps = every_n_steps
        self.max_rollbacks = max_rollbacks
        self.rollbacks = 0
        """How often the run has gone back."""
        self.passed_over: set[int] = set()
        """Steps, by the `global_step` before them, that are not made when the run comes to them again."""
        self._statistic = SpikeStatistic(threshold, window, warmup)
        self._losses: Tensor | None = None
        self._marks: list[_Mark] = []
        self._looks: list[_Look] = []  # whose losses had not all arrived on every rank
        self._step = 0  # steps made as the current micro-batch began
        self._dropping: bool | None = None  # of the step that is about to be made; None before it is known

    @property
    def state_key(self) -> str:
        """The class and its action."""
        return f"{type(self).__qualname__}{ {'action': self.action}!r}"

    def state_dict(self) -> dict[str, Any]:
        """What is normal, and what was gone back from."""
        return {
            "losses": self._statistic.state_dict(),
            "rollbacks": self.rollbacks,
            "passed_over": sorted(self.passed_over),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Know what was normal then; what was learnt since from going back is not forgotten."""
        self._statistic.load_state_dict(state_dict["losses"])
        self.rollbacks = max(self.rollbacks, state_dict["rollbacks"])
        self.passed_over |= set(state_dict["passed_over"])

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin with nothing seen."""
        if self.action != "warn":
            self._check(trainer, module)
        self._losses, self._marks, self._looks, self._dropping = None, [], [], None
        self._step = trainer.global_step

    def on_before_backward(self, trainer: RunContext, module: TrainModule, loss: Tensor) -> None:
        """Keep the loss on its device."""
        self._step = trainer.global_step
        if self._losses is None:
            # Half precision's largest number would make an ordinary sum of losses infinite.
            dtype = torch.float32 if loss.device.type == "mps" else torch.float64
            self._losses = torch.zeros(_CAPACITY, dtype=dtype, device=loss.device)
        self._losses[len(self._marks)].add_(loss.detach())

    def on_before_optimizer_step(self, trainer: RunContext, module: TrainModule, optimizer: Optimizer) -> None:
        """Drop the gradients of a step that is not to be made."""
        if self.action == "warn":
            return
        if self._dropping is None:
            self._dropping = self._is_dropped(trainer)
        if self._dropping:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Note which step that was, and look when it is time."""
        self._dropping = None
        self._marks.append(_Mark(self._step, trainer.micro_batch_weight))
        step = trainer.global_step
        made, self._step = step != self._step, step
        if (made and step % self.every_n_steps == 0) or len(self._marks) == _CAPACITY:
            self._look(trainer, wait=self.action != "warn")

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Look before what may be saved after it."""
        self._look(trainer)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Look at what is left of the epoch."""
        self._look(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_losses": None, "_marks": [], "_looks": []}

    # Looking

    def _look(self, trainer: RunContext, wait: bool = True) -> None:
        if self._marks:
            self._looks.append(_Look(self._marks, self._read_losses()))
            self._marks = []
        if not self._looks:
            return
        means = self._means(trainer, wait)
        spikes: dict[int, float] = {}
        usual = ""
        for step, loss in means.items():
            if self._statistic.is_spike(loss) and step not in self.passed_over:
                usual = usual or self._usual()  # before the first of them
                spikes[step] = loss
            self._statistic.add(loss)
        if not spikes or self.action == "skip":  # those that were skipped are told of as they come
            return
        first = min(spikes)
        what = f"The loss rose to {spikes[first]:.4g} in the step after global_step={first} ({usual})"
        if self.action == "warn":
            self._say(trainer, f"LossSpikeGuard: {what}, {len(spikes)} step(s) of the last {len(means)} like it.")
        else:
            self._go_back(trainer, what, spikes)

    def _read_losses(self) -> Readback | None:
        """Begin to bring over the losses of the micro-batches marked, and make room for the next ones."""
        if self._losses is None:
            return None
        losses = Readback(self._losses[: len(self._marks)])
        self._losses.zero_()
        return losses

    def _means(self, trainer: RunContext, wait: bool) -> dict[int, float]:
        """Each step's mean loss over its micro-batches on all ranks, by the step before it.

        Those whose losses have not arrived on some rank stay for the next time, unless all ranks ``wait`` for them.
        """
        looks = self._looks
        arrived = len(looks)
        if not wait:
            arrived = sum(1 for _ in takewhile(_Look.has_arrived, looks))
        mine = [look.sums() if index < arrived else look.no_sums() for index, look in enumerate(looks)]
        told = torch.tensor([float(arrived), *chain(*(chain(*one.values()) for one in mine))], dtype=torch.float64)
        gathered = trainer.strategy.control.all_gather(told)
        everyone = iter(gathered[:, 1:].sum(0).view(-1, 2).tolist())  # the steps are alike on every rank
        known = int(gathered[:, 0].min())
        self._looks = looks[known:]
        steps = chain(*mine[:known])
        return {step: total / count for step, (total, count) in zip(steps, everyone, strict=False) if count}

    def _is_dropped(self, trainer: RunContext) -> bool:
        """Whether the step that comes next is not to be made; alike on every rank."""
        if self.action == "rollback":
            return self._step in self.passed_over
        assert self._losses is not None
        weights = [mark.weight for mark in self._marks if mark.step == self._step] + [trainer.micro_batch_weight]
        losses = self._losses[len(self._marks) + 1 - len(weights) : len(self._marks) + 1].tolist()
        mine = [loss for loss, weight in zip(losses, weights, strict=True) if weight > 0]
        told = torch.tensor([sum(mine), float(len(mine))], dtype=torch.float64)
        total, count = trainer.strategy.control.all_gather(told).sum(0).tolist()
        loss = total / count if count else 0.0
        if not self._statistic.is_spike(loss):
            return False
        self._say(
            trainer,
            f"LossSpikeGuard: no step is made from a loss of {loss:.4g} ({self._usual()}) after "
            f"global_step={self._step}.",
        )
        return True

    def _usual(self) -> str:
        return f"the usual is {self._statistic.middle:.4g}, the limit {self._statistic.limit:.4g}"

    def _go_back(self, trainer: RunContext, what: str, spikes: Iterable[int]) -> None:
        first, last = min(spikes), max(spikes)
        if self.rollbacks >= self.max_rollbacks:
            raise LossSpikeError(
                f"{what}.",
                f"the run has gone back {self.rollbacks} time(s) already, and may not go back more often",
                "lower the learning rate, clip gradients (gradient_clip_val), look at that step's data, or allow more",
            )
        found = trainer.checkpoint_before(first)
        if found is None:
            raise LossSpikeError(
                f"{what}.",
                "there is no whole checkpoint from before it to go back to",
                "save more often than spikes come, at multiples of every_n_steps, and keep several: "
                "Checkpoint(every_n_train_steps=..., keep_last=2)",
            )
        path, step = found
        self.rollbacks += 1
        self.passed_over |= set(range(first, last + 1))
        self._say(
            trainer,
            f"LossSpikeGuard: {what}. Going back from global_step={trainer.global_step} to {step}, {path}, rollback "
            f"{self.rollbacks} of {self.max_rollbacks}; steps {first} to {last} are passed over this time.",
        )
        trainer.roll_back(path)

    def _say(self, trainer: RunContext, message: str) -> None:
        if trainer.strategy.rank == 0:
            logger.warning(message)

    def _check(self, trainer: RunContext, module: TrainModule) -> None:
        if not trainer.strategy.accepts_none_loss:
            why = f"strategy {trainer.strategy.name!r} keeps its gradients to itself, and cannot pass over a step"
        elif not module.automatic_optimization:
            why = "in manual optimization training_step makes its steps itself"
        elif self.action == "rollback" and not any(one.saves_whole for one in trainer.callbacks):
            why = "there is no Checkpoint callback, nor another that saves what the run could go back to"
        else:
            return
        raise ConfigurationError(
            f"LossSpikeGuard(action={self.action!r})",
            why,
            "use action='warn', or for 'rollback' add Checkpoint(every_n_train_steps=..., keep_last=2)",
        )
