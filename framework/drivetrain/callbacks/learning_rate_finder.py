"""LearningRateFinder: finds a learning rate before a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.callbacks._finder import Finder
from drivetrain.callbacks._tuned_attributes import set_attribute
from drivetrain.callbacks.lr_search import LRFind, LRSearch

if TYPE_CHECKING:
    from drivetrain.run_context import Trials


class LearningRateFinder(Finder):
    """Trains with increasing learning rates before a fit, and sets the rate at which the loss falls most steeply.

    The search trains a copy of the module and restores data, random generators and counters, so only the learning rate
    of the fit changes. The result is in `optimal_lr`.

    A run that resumes from the path of a checkpoint uses the rate that the checkpoint contains, and does not search. A
    run with ``ckpt_path`` "auto", "last" or "best" searches, because there may be no checkpoint to resume from.

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
    _saved_attributes = ("_suggestion",)

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        self._search = LRSearch(min_lr, max_lr, num_training_steps, mode, early_stop_threshold, update_attr, attr_name)
        self._suggestion: float | None = None
        self.optimal_lr: LRFind | None = None
        """The result of the search; None before a search."""

    def search(self, trials: Trials) -> None:
        """Search, and set the attribute to the rate that is found."""
        self.optimal_lr = self._search.run(trials)
        self._suggestion = self.optimal_lr.suggestion()

    def restore(self, saved: dict[str, Any], trials: Trials) -> None:
        """Set the attribute to the rate of the run that is resumed."""
        self._suggestion = saved.get("suggestion")
        if self._search.update_attr and self._suggestion is not None:
            set_attribute(self._search.attribute(trials), self._suggestion, trials.module, trials.datamodule)
