"""LearningRateFinder: finds a learning rate before a fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.callbacks._lr_search import LRFind, check_lr_arguments, find_lr, lr_attribute
from drivetrain.callbacks._tuned_attributes import set_attribute
from drivetrain.callbacks._tuned_value import load_saved_result
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext, Trials


class LearningRateFinder(Callback):
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
        check_lr_arguments(min_lr, max_lr, num_training_steps, mode, early_stop_threshold)
        self._min_lr, self._max_lr = min_lr, max_lr
        self._num_training_steps = num_training_steps
        self._mode = mode
        self._early_stop_threshold = early_stop_threshold
        self._update_attr = update_attr
        self._attr_name = attr_name
        self._was_launched = False
        self._suggestion: float | None = None
        self.optimal_lr: LRFind | None = None
        """The result of the search; None before a search."""

    def state_dict(self) -> dict[str, Any]:
        return {"suggestion": self._suggestion}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._suggestion = state_dict["suggestion"]

    def before_launch(self, trials: Trials) -> None:
        self._was_launched = True
        if trials.stage != "fit" or trials.is_dry_run:
            return
        saved = load_saved_result(trials.ckpt_path, self.state_key)
        if saved is not None:
            self._suggestion = saved.get("suggestion")
            if self._update_attr and self._suggestion is not None:
                name = lr_attribute(trials.module, trials.datamodule, self._attr_name)
                set_attribute(name, self._suggestion, trials.module, trials.datamodule)
            return
        self.optimal_lr = find_lr(
            trials,
            self._min_lr,
            self._max_lr,
            self._num_training_steps,
            self._mode,
            self._early_stop_threshold,
            self._update_attr,
            self._attr_name,
        )
        self._suggestion = self.optimal_lr.suggestion()

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        check_was_launched(self, self._was_launched or stage != "fit")


def check_was_launched(callback: Callback, was_launched: bool) -> None:
    """Raise an error if a finder was added to the run too late to search.

    Raises:
        ConfigurationError: the callback's `before_launch` was not called.
    """
    if not was_launched:
        raise ConfigurationError(
            f"{type(callback).__name__} was added after the run had started.",
            "the search runs before set-up, so a finder cannot be added in configure_callbacks or setup.",
            "pass the finder to Fit(callbacks=...).",
        )
