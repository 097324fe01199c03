"""LearningRateFinder: a learning rate found before a fit begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.callbacks._lr_search import LRFind, check_lr_arguments, find_lr, lr_attribute
from drivetrain.callbacks._tuned_attributes import set_attribute
from drivetrain.callbacks._tuned_value import saved_finding
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext, Trials


class LearningRateFinder(Callback):
    """Tries growing learning rates before a fit begins, and sets the one at which the loss falls most steeply.

    The search trains a copy: module, data, generators and counters are as they were, and the fit that follows is the
    one that would have been, with another learning rate. `optimal_lr` holds what was found. Afterwards a run that goes
    on from a checkpoint takes the rate from there, and does not search; one with ``ckpt_path`` "auto", "last" or "best"
    does, for it may begin.

    Args:
        min_lr: of the first step.
        max_lr: of the last step.
        num_training_steps: optimizer steps of the search.
        mode: "exponential" or "linear": how the rate grows.
        early_stop_threshold: ends the search where the smoothed loss is more than so many times the best one; None
            never does.
        update_attr: set ``lr`` or ``learning_rate`` of the module or of its hyper-parameters, before
            ``configure_optimizers`` is called.
        attr_name: which attribute instead.

    Raises:
        ConfigurationError: an argument is wrong; as a fit begins, there is no such attribute, several optimizers or
            manual optimization.
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
        self._was_asked = False
        self._suggestion: float | None = None
        self.optimal_lr: LRFind | None = None
        """What was found; None before a search."""

    def state_dict(self) -> dict[str, Any]:
        return {"suggestion": self._suggestion}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._suggestion = state_dict["suggestion"]

    def before_launch(self, trials: Trials) -> None:
        self._was_asked = True
        if trials.stage != "fit" or trials.is_dry_run:
            return
        saved = saved_finding(trials.ckpt_path, self.state_key)
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
        refuse_unasked(self, self._was_asked or stage != "fit")


def refuse_unasked(callback: Callback, was_asked: bool) -> None:
    """Refuse a finder that came too late to search.

    Raises:
        ConfigurationError: it was not there when the run was asked for.
    """
    if not was_asked:
        raise ConfigurationError(
            f"{type(callback).__name__} came after the run had begun.",
            "it searches before anything is set up: in configure_callbacks or setup that is over.",
            "pass it as Fit(callbacks=...).",
        )
