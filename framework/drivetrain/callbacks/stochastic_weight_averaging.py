"""StochasticWeightAveraging: averages the weights of the last epochs, trained with a separate learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain.callbacks.weight_averaging import AverageFn, WeightAveraging
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_STRATEGIES = ("cos", "linear")


class StochasticWeightAveraging(WeightAveraging):
    """Averages the weights at the end of each of the last epochs, trained with the learning rates ``swa_lrs``.

    From epoch ``swa_epoch_start`` on, the learning rates are annealed per epoch from their current values to
    ``swa_lrs``, as `torch.optim.swa_utils.SWALR` does. These rates override those of the module's schedulers. After the
    last epoch the averages are loaded into the module. If the module has batch normalization, the running statistics
    are then recomputed in one pass over the training data, on all ranks. Validation within `fit` uses the trained
    weights, not the averages, because the statistics of the averages are not known yet. See `WeightAveraging` for how
    averages are stored.

    Args:
        swa_lrs: the final learning rate, or one learning rate for each parameter group of the optimizers.
        swa_epoch_start: the first epoch to average, counted from 1, or a float as a fraction of ``max_epochs``.
        annealing_epochs: the number of epochs until ``swa_lrs`` is reached; 0 uses ``swa_lrs``
            immediately.
        annealing_strategy: "cos" or "linear".
        avg_fn: the function of `WeightAveraging` that computes new averages; None computes the mean.

    Raises:
        ConfigurationError: an argument is invalid; at the start of the run, if ``swa_epoch_start`` is a fraction
            without ``max_epochs``, the number of ``swa_lrs`` is not the number of parameter groups, or a module with
            batch normalization uses manual optimization.
    """

    priority = 50  # before callbacks that log the learning rates
    _saved_attributes = (*WeightAveraging._saved_attributes, "_initial_rates")

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: AverageFn | None = None,
    ) -> None:
        check_types(StochasticWeightAveraging, locals())
        rates: list[Any] = [swa_lrs] if isinstance(swa_lrs, int | float) else list(swa_lrs)
        rates_are_valid = rates and all(isinstance(rate, int | float) and rate > 0 for rate in rates)
        start_is_valid = swa_epoch_start >= 1 if type(swa_epoch_start) is int else 0 <= swa_epoch_start <= 1
        if not rates_are_valid or not start_is_valid:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}, swa_epoch_start={swa_epoch_start!r})",
                "swa_lrs is one positive learning rate, or one for each parameter group, and swa_epoch_start an epoch, "
                "counted from 1, or a fraction of max_epochs",
                "give for example StochasticWeightAveraging(0.05, swa_epoch_start=0.8)",
            )
        owner, shape = "StochasticWeightAveraging", "how the learning rates change during annealing"
        check_count(owner, "annealing_epochs", annealing_epochs, 0, "a number of epochs")
        check_choice(owner, "annealing_strategy", annealing_strategy, _STRATEGIES, shape)
        super().__init__(avg_fn, use_buffers=False, evaluate=False)
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self._first_epoch = 0  # the first epoch to average, counted from 0
        self._initial_rates: list[float] = []  # each group's learning rate at the start of the first epoch to average

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True at the end of each epoch from ``swa_epoch_start`` on."""
        return epoch_idx is not None and epoch_idx >= self._first_epoch

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        """Determine the first epoch to average."""
        super().setup(trainer, module, stage)
        if stage != "fit":
            return
        self._initial_rates = []
        start, epochs = self.swa_epoch_start, trainer.max_epochs
        if type(start) is not int:
            if epochs is None or epochs < 0:
                raise ConfigurationError(
                    f"StochasticWeightAveraging(swa_epoch_start={start!r}) without max_epochs",
                    "a float is a fraction of max_epochs",
                    "give an epoch as an int, or set max_epochs",
                )
            start = int(start * epochs)
        self._first_epoch = max(int(start) - 1, 0)

    def on_train_start(self, trainer: RunContext, module: Any) -> None:
        """Check the number of learning rates, and that statistics of batch normalization can be computed."""
        groups = sum(len(optimizer.param_groups) for optimizer in trainer.optimizers)
        if not isinstance(self.swa_lrs, int | float) and len(self.swa_lrs) != groups:
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs={self.swa_lrs!r})",
                f"the optimizers have {groups} parameter groups",
                "give one rate, or one for each group",
            )
        if not module.automatic_optimization and _batch_norm_layers(module):
            raise ConfigurationError(
                f"StochasticWeightAveraging with {type(module).__name__}, which has batch normalization and uses "
                "manual optimization.",
                "at the end, training_step is called without gradients to recompute the statistics, but in manual "
                "optimization training_step also steps the optimizers",
                "use WeightAveraging, or automatic optimization",
            )

    def on_train_batch_start(self, trainer: RunContext, module: Any, batch: Any, batch_idx: int) -> None:
        """Set the learning rates of the epoch, which a scheduler may have changed."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if trainer.current_epoch < self._first_epoch:
            return
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        while len(self._initial_rates) < len(groups):
            self._initial_rates.append(float(groups[len(self._initial_rates)]["lr"]))
        progress = self._annealing_progress(trainer.current_epoch - self._first_epoch)
        for number, (group, initial_rate) in enumerate(zip(groups, self._initial_rates, strict=True)):
            rate = self._rate_of(number) * progress + initial_rate * (1 - progress)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_end(self, trainer: RunContext, module: Any) -> None:
        """Load the averages into the module, and recompute the statistics of batch normalization."""
        super().on_train_end(trainer, module)
        layers = _batch_norm_layers(module) if self.updates else []
        if layers:
            assert self._averages is not None
            self._averages.keep_trained_buffers()
            _recompute_statistics(layers, trainer)

    def _rate_of(self, group: int) -> float:
        if isinstance(self.swa_lrs, int | float):
            return float(self.swa_lrs)
        return float(
            self.swa_lrs[min(group, len(self.swa_lrs) - 1)]
        )  # A group that was added later uses the last rate.

    def _annealing_progress(self, epochs: int) -> float:
        """Return the fraction of the annealing, between 0 and 1, that is done ``epochs`` epochs after the start."""
        progress = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        return (1 - math.cos(math.pi * progress)) / 2 if self.annealing_strategy == "cos" else progress


def _batch_norm_layers(module: Any) -> list[_BatchNorm]:
    """Return the layers of batch normalization that track running statistics."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
    ]


def _recompute_statistics(layers: Sequence[_BatchNorm], trainer: RunContext) -> None:
    """Recompute running statistics as the mean over the training micro-batches of all ranks.

    A collective operation. A layer that is not called in train mode keeps its statistics.
    """
    original_buffers = [
        {name: buffer.clone() for name, buffer in layer.named_buffers(recurse=False)} for layer in layers
    ]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # makes torch compute a cumulative average
    try:
        trainer.pass_over_training_data()
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    for layer, buffers in zip(layers, original_buffers, strict=True):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        assert layer.num_batches_tracked is not None
        count = layer.num_batches_tracked.double()
        local = torch.cat([layer.running_mean.double() * count, layer.running_var.double() * count, count[None]])
        total = trainer.strategy.reduce(local, "sum")
        if not total[-1]:
            for name, buffer in layer.named_buffers(recurse=False):
                buffer.copy_(buffers[name])
            continue
        mean, variance = (total[:-1] / total[-1]).chunk(2)
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
        layer.num_batches_tracked.copy_(total[-1])
