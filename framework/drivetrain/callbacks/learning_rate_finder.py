"""LearningRateFinder: trains with a growing learning rate before a fit and finds where the loss falls fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain._runtime.lazy_names import import_optional
from drivetrain.callback import Callback
from drivetrain.callbacks._finder import Finder, find_holders, set_attribute
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.callback import Trials
    from drivetrain.run_context import RunContext

_MODES = ("exponential", "linear")
_ATTRIBUTES = ("lr", "learning_rate")
_SMOOTHING = 0.98
"""Decay of the exponential moving average of the loss."""


@dataclass(eq=False, repr=False)
class LearningRateFinder(Finder):
    """Trains with increasing learning rates before a fit, and sets the rate at which the loss falls most steeply.

    The search trains a copy of the module and restores data, random generators and counters, so only the learning rate
    of the fit changes. The result is in `optimal_lr`.

    A run that resumes from a checkpoint searches too, and then goes on with the checkpoint's rate.

    Args:
        min_lr: the learning rate of the first step.
        max_lr: the learning rate of the last step.
        num_training_steps: optimizer steps of the search.
        mode: how the rate grows: "exponential" or "linear".
        early_stop_threshold: the multiple of the best smoothed loss above which the search stops; None never stops
            early.
        update_attr: whether to set ``lr`` or ``learning_rate`` of the module or its hyper-parameters, before
            ``configure_optimizers`` is called.
        attr_name: the name of another attribute to set instead.

    Raises:
        ConfigurationError: an argument is invalid; at the start of a fit, also if the attribute does not exist, the
            module has not exactly one optimizer, or the module uses manual optimization.
    """

    _stages = ("fit",)

    min_lr: float = 1e-8
    max_lr: float = 1
    num_training_steps: int = 100
    mode: str = "exponential"
    early_stop_threshold: float | None = 4.0
    update_attr: bool = True
    attr_name: str = ""

    def __post_init__(self) -> None:
        check_types(LearningRateFinder, vars(self))
        grows = "whether the learning rate grows by a constant factor or amount"
        check_choice("LearningRateFinder", "mode", self.mode, _MODES, grows)
        if not 0 < self.min_lr < self.max_lr:
            raise ConfigurationError(
                f"min_lr={self.min_lr!r} with max_lr={self.max_lr!r}.",
                "the learning rate grows from min_lr to max_lr during the search.",
                "give 0 < min_lr < max_lr, such as 1e-8 and 1.",
            )
        steps = "the number of optimizer steps whose losses are compared"
        check_count("LearningRateFinder", "num_training_steps", self.num_training_steps, 2, steps)
        self.optimal_lr: LRFind | None = None
        """The result of the search; None before a search."""

    def search(self, trials: Trials) -> LRFind:
        """Search, and set the attribute to the rate that is found. A collective operation.

        Raises:
            ConfigurationError: the module has no single optimizer that the engine steps, or there is no attribute to
                update.
        """
        name = self._attribute(trials) if self.update_attr else None
        if name is not None:
            trials.declare_tuned(name)
        test = _RangeTest(self)
        trials.run(test, self.num_training_steps)
        self.optimal_lr = LRFind({"lr": test.rates, "loss": test.losses}, self.mode)
        suggestion = self.optimal_lr.suggestion()
        owner = type(trials.module).__name__
        if name is not None and suggestion is not None:
            set_attribute(name, suggestion, trials.module, trials.datamodule)
            trials.log_info("%s.%s is set to the learning rate %.4g.", owner, name, suggestion)
        elif name is not None:
            trials.log_info("The search suggests no learning rate, so %s.%s is unchanged.", owner, name)
        return self.optimal_lr

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step of the search, counted from 0."""
        fraction = min(step, self.num_training_steps - 1) / (self.num_training_steps - 1)
        if self.mode == "linear":
            return self.min_lr + fraction * (self.max_lr - self.min_lr)
        return float(self.min_lr * (self.max_lr / self.min_lr) ** fraction)

    def _attribute(self, trials: Trials) -> str:
        """Return the name of the attribute or hyper-parameter that holds the learning rate.

        Raises:
            ConfigurationError: neither the module nor the data module has such an attribute or hyper-parameter.
        """
        names = (self.attr_name,) if self.attr_name else _ATTRIBUTES
        for name in names:
            if find_holders(name, trials.module, trials.datamodule):
                return name
        raise ConfigurationError(
            f"{type(trials.module).__name__} has no attribute or hyper-parameter {' or '.join(map(repr, names))}.",
            "update_attr=True sets that attribute to the suggested learning rate, for configure_optimizers to read.",
            "set self.lr = ... in __init__ and use it, name another attribute (attr_name=), or pass update_attr=False.",
        )


class LRFind:
    """The result of a learning rate search, the same on every rank: the rates that were tried and their losses.

    Args:
        results: ``{"lr": [...], "loss": [...]}``, with one rate and one smoothed loss per optimizer step.
        mode: how the rates grow: "exponential" or "linear".

    Based on Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186).
    """

    def __init__(self, results: Mapping[str, list[float]], mode: str = "exponential") -> None:
        self.results: dict[str, list[float]] = {name: list(values) for name, values in results.items()}
        self.mode = mode

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate with the steepest fall of the loss.

        The slope is taken over the logarithm of the rate in "exponential" mode.

        Args:
            skip_begin: points to ignore at the beginning.
            skip_end: points to ignore at the end.

        Returns:
            The learning rate; None if fewer than two points with a finite loss remain.
        """
        index = self._steepest(skip_begin, skip_end)
        return None if index is None else self.results["lr"][index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plot the losses over the learning rates and return the matplotlib figure.

        Args:
            suggest: whether to mark the suggested rate.
            show: whether to call ``pyplot.show``.
            ax: the axes to draw on; None creates a new figure.

        Raises:
            ConfigurationError: matplotlib is not installed.
        """
        fix = "pip install matplotlib, or plot results['loss'] over results['lr'] yourself."
        pyplot = import_optional("matplotlib.pyplot", "LRFind.plot", fix)
        if ax is None:
            figure, ax = pyplot.subplots()
        else:
            figure = ax.figure
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        index = self._steepest(10, 1) if suggest else None
        if index is not None:
            ax.plot(self.results["lr"][index], self.results["loss"][index], marker="o", markersize=10, color="red")
        if show:
            pyplot.show()
        return figure

    def _steepest(self, skip_begin: int, skip_end: int) -> int | None:
        last = len(self.results["loss"]) - skip_end
        indices = [index for index in range(skip_begin, last) if math.isfinite(self.results["loss"][index])]
        if len(indices) < 2:
            return None
        losses = torch.tensor([self.results["loss"][index] for index in indices], dtype=torch.float64)
        rates = torch.tensor([self.results["lr"][index] for index in indices], dtype=torch.float64)
        (slopes,) = torch.gradient(losses, spacing=[rates.log10() if self.mode == "exponential" else rates])
        return indices[int(slopes.argmin())]


class _RangeTest(Callback):
    """Sets the learning rate before each step of a trial and records the loss of the step."""

    _saved_attributes = ("rates", "losses")

    def __init__(self, finder: LearningRateFinder) -> None:
        self._finder = finder
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._average = 0.0
        self._best = math.inf
        self._last_step = 0
        self._sum: Any = 0.0  # weighted sum of the losses of the current accumulation window
        self._weight = 0.0

    def on_fit_start(self, trainer: RunContext, module: Any) -> None:
        count = len(trainer.optimizers)
        if not module.automatic_optimization or count != 1:
            raise ConfigurationError(
                f"The learning rate of {type(module).__name__}, with {count} optimizers and "
                f"automatic_optimization={module.automatic_optimization}, cannot be searched for.",
                "the search sets the rate of one optimizer before each step, and the engine makes the step.",
                "return one optimizer, or choose the rates by hand.",
            )

    def on_before_zero_grad(self, trainer: RunContext, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self._sum, self._weight = 0.0, 0.0
        rate = self._finder.rate_at(trainer.global_step)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = trainer.micro_batch_weight
        if weight and outputs.get("loss") is not None:
            self._sum = self._sum + outputs["loss"].double().item() * weight
            self._weight += weight
        if trainer.global_step == self._last_step:  # The accumulation window is incomplete, or fp16 skipped it.
            return
        self._last_step = trainer.global_step
        strategy = trainer.strategy
        # The dtype is float32, because not every device supports float64.
        totals = torch.tensor([self._sum, self._weight], dtype=torch.float32, device=strategy.device)
        total, weights = (
            strategy.reduce(totals, "sum").tolist() if strategy.world_size > 1 else (self._sum, self._weight)
        )
        self._record_loss(trainer, total / weights if weights else math.nan)

    def _record_loss(self, trainer: RunContext, loss: float) -> None:
        """Record the loss of a step, which is the same on every rank, and stop the trial if the loss diverges."""
        self.rates.append(self._finder.rate_at(self._last_step - 1))
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smoothed = self._average / (1 - _SMOOTHING ** len(self.rates))
        self.losses.append(smoothed)
        threshold = self._finder.early_stop_threshold
        if threshold is not None and len(self.rates) > 1:
            # The margin is a multiple of abs(best): if best is negative, a multiple of best would be below best.
            limit = self._best + (threshold - 1) * abs(self._best) if math.isfinite(self._best) else math.inf
            if not math.isfinite(smoothed) or smoothed > limit:
                trainer.should_stop = True
        if math.isfinite(smoothed):
            self._best = min(self._best, smoothed)
