"""StochasticWeightAveraging: the mean of the weights at the ends of the last epochs, trained at a rate of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.callbacks.weight_averaging import AverageFn, WeightAveraging
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_STRATEGIES = ("cos", "linear")


class StochasticWeightAveraging(WeightAveraging):
    """Averages the weights at the end of each of the last epochs, whose learning rate goes to one of their own.

    From epoch ``swa_epoch_start`` on the learning rates are annealed, epoch by epoch, from where they stand to
    ``swa_lrs``, as `torch.optim.swa_utils.SWALR` does, whatever the module's schedulers say. After the last epoch the
    averages are put in the module, and where it has batch normalisation the training data is gone through once more for
    its statistics, which are those of all ranks' micro-batches. Validation within `fit` sees the weights that train,
    whose statistics are known. How averages are kept is as in `WeightAveraging`.

    Args:
        swa_lrs: the learning rate that is gone to, or one for each group of the optimizers' parameters.
        swa_epoch_start: the first such epoch, counted from 1; a float is a part of ``max_epochs``.
        annealing_epochs: epochs that it takes to come to ``swa_lrs``; 0 is there at once.
        annealing_strategy: "cos" or "linear".
        avg_fn: as for `WeightAveraging`; None for the mean.

    Raises:
        ConfigurationError: an argument is wrong; at the run's start, ``swa_epoch_start`` is a part and ``max_epochs``
            is not known, ``swa_lrs`` has another number of values than there are groups, or a module with batch
            normalisation optimizes by hand.
    """

    priority = 50  # learning rates are set before they are logged

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: AverageFn | None = None,
    ) -> None:
        rates: list[Any] = [swa_lrs] if isinstance(swa_lrs, int | float) else list(swa_lrs)
        if not rates or not all(isinstance(one, int | float) and one > 0 for one in rates):
            raise _refused("swa_lrs", swa_lrs, "it is a learning rate, or one a group", "give 0.05, say")
        whole = type(swa_epoch_start) is int
        if not (swa_epoch_start >= 1 if whole else 0 <= swa_epoch_start <= 1):
            raise _refused("swa_epoch_start", swa_epoch_start, "it is an epoch or a part", "give 1 or more, or 0.8")
        if type(annealing_epochs) is not int or annealing_epochs < 0:
            raise _refused("annealing_epochs", annealing_epochs, "it is a number of epochs", "give 0 or more")
        if annealing_strategy not in _STRATEGIES:
            hint = nearest(str(annealing_strategy), _STRATEGIES)
            raise _refused(
                "annealing_strategy", annealing_strategy, f"there is no such.{hint}", "give 'cos' or 'linear'"
            )
        super().__init__(avg_fn, use_buffers=False, evaluate=False)
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self._first = 0  # epoch, counted from 0
        self._before: list[float] = []  # each group's learning rate as the first epoch began

    def state_dict(self) -> dict[str, Any]:
        """The learning rates that annealing began with, too."""
        return {**super().state_dict(), "rates_before": self._before}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Anneal from the same learning rates."""
        super().load_state_dict(state_dict)
        self._before = list(state_dict["rates_before"])

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """At the end of each epoch from the first on."""
        return epoch_idx is not None and epoch_idx >= self._first

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Find out with which epoch it begins."""
        super().setup(trainer, module, stage)
        if stage != "fit":
            return
        self._before = []
        start, epochs = self.swa_epoch_start, trainer.max_epochs
        if type(start) is not int and epochs in (None, -1):
            raise _refused("swa_epoch_start", start, "it is a part of max_epochs, which is not given", "give an epoch")
        if type(start) is not int:
            assert epochs is not None
            start = int(start * epochs)
        self._first = max(int(start) - 1, 0)
        if epochs is not None and 0 <= epochs <= self._first:
            raise _refused(
                "swa_epoch_start", start, f"max_epochs is {epochs}: nothing would be averaged", "give an earlier epoch"
            )

    def on_train_start(self, trainer: RunContext, module: Any) -> None:
        """See whether each group has its learning rate, and whether the statistics can be had."""
        groups = sum(len(one.param_groups) for one in trainer.optimizers)
        if not isinstance(self.swa_lrs, int | float) and len(self.swa_lrs) != groups:
            raise _refused("swa_lrs", self.swa_lrs, f"the optimizers have {groups} group(s)", "give one rate for each")
        if not module.automatic_optimization and _normalising(module):
            raise ConfigurationError(
                f"StochasticWeightAveraging, and {type(module).__name__} optimizes by hand and normalises batches.",
                "its training_step would be called without gradients at the end, for the averages' statistics, and "
                "steps its optimizers itself",
                "use WeightAveraging, or automatic optimization",
            )

    def on_train_batch_start(self, trainer: RunContext, module: Any, batch: Any, batch_idx: int) -> None:
        """Set the epoch's learning rates, whatever a scheduler has made of them since."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if trainer.current_epoch < self._first:
            return
        groups = [group for one in trainer.optimizers for group in one.param_groups]
        while len(self._before) < len(groups):
            self._before.append(float(groups[len(self._before)]["lr"]))
        part = self._annealed(trainer.current_epoch - self._first)
        for number, (group, before) in enumerate(zip(groups, self._before, strict=True)):
            rate = self._rate_of(number) * part + before * (1 - part)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_end(self, trainer: RunContext, module: Any) -> None:
        """Leave the averages in the module, with statistics of batch normalisation that are theirs."""
        super().on_train_end(trainer, module)
        layers = _normalising(module) if self.updates else []
        if layers:
            _renew_statistics(layers, trainer)

    def _rate_of(self, group: int) -> float:
        if isinstance(self.swa_lrs, int | float):
            return float(self.swa_lrs)
        return float(self.swa_lrs[min(group, len(self.swa_lrs) - 1)])  # one that was added since has the last one's

    def _annealed(self, epochs: int) -> float:
        """Which part of the way the learning rates have gone, ``epochs`` having been trained since the beginning."""
        way = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        return (1 - math.cos(math.pi * way)) / 2 if self.annealing_strategy == "cos" else way


def _normalising(module: Any) -> list[_BatchNorm]:
    """The layers that follow the statistics of what they are given."""
    return [
        one
        for one in module.modules()
        if isinstance(one, _BatchNorm) and one.track_running_stats and one.running_mean is not None
    ]


def _renew_statistics(layers: Sequence[_BatchNorm], trainer: RunContext) -> None:
    """Let layers gather statistics over the training data: the mean over the micro-batches of all ranks. Collective.

    A layer that met no micro-batch in train mode, as it is kept in evaluation or not called, stays as it was.
    """
    before = [{name: buffer.clone() for name, buffer in layer.named_buffers(recurse=False)} for layer in layers]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative average
    try:
        trainer.pass_over_training_data()
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    for layer, buffers in zip(layers, before, strict=True):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        assert layer.num_batches_tracked is not None
        count = layer.num_batches_tracked.double()
        told = torch.cat([layer.running_mean.double() * count, layer.running_var.double() * count, count[None]])
        total = trainer.strategy.reduce(told, "sum")
        if not total[-1]:
            for name, buffer in layer.named_buffers(recurse=False):
                buffer.copy_(buffers[name])
            continue
        mean, variance = (total[:-1] / total[-1]).chunk(2)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
        layer.num_batches_tracked.copy_(total[-1])


def _refused(name: str, value: Any, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"StochasticWeightAveraging({name}={value!r})", why, fix)
