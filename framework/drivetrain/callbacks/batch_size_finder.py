"""BatchSizeFinder: the largest batch size that fits, found before a run begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.callbacks._batch_size_search import check_batch_size_arguments, find_batch_size
from drivetrain.callbacks._tuned_attributes import set_attribute
from drivetrain.callbacks._tuned_value import saved_finding
from drivetrain.callbacks.learning_rate_finder import refuse_unasked
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext, Trials


class BatchSizeFinder(Callback):
    """Tries growing batch sizes before a run begins, and sets the largest one that fits the memory of every rank.

    The loaders come from a data module or from the module's own methods, which build them with an attribute that is
    set. The search runs copies: everything but that attribute is as it was. `optimal_batch_size` holds what was found.
    A run that goes on from a checkpoint takes the size from there, and does not search; one with ``ckpt_path`` "auto",
    "last" or "best" does, for it may begin.

    Args:
        mode: "power" doubles the size until one does not fit; "binsearch" goes on between the last two.
        steps_per_trial: optimizer steps (of evaluation: micro-batches) of each size.
        init_val: what is tried first.
        max_trials: sizes that are tried at most.
        batch_arg_name: the attribute of the module, of the data module or of their hyper-parameters.

    Raises:
        ConfigurationError: an argument is wrong; as a run begins, there is no such attribute, loaders were given
            directly, or not even the smallest size fits.
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
    ) -> None:
        check_batch_size_arguments(mode, init_val, max_trials, steps_per_trial)
        self._mode = mode
        self._steps_per_trial = steps_per_trial
        self._init_val = init_val
        self._max_trials = max_trials
        self._batch_arg_name = batch_arg_name
        self._was_asked = False
        self.optimal_batch_size: int | None = None
        """What was found, per rank; None before a search."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimal_batch_size = state_dict["optimal_batch_size"]

    def before_launch(self, trials: Trials) -> None:
        self._was_asked = True
        if trials.is_dry_run:
            return
        if trials.loaders is not None:
            raise ConfigurationError(
                f"BatchSizeFinder, and {trials.stage} was given its loaders.",
                "they stay as they are: the size that is found would not be used.",
                f"give a data module that builds them with self.{self._batch_arg_name}, or ask "
                "Tuner(fit).scale_batch_size beforehand.",
            )
        saved = saved_finding(trials.ckpt_path, self.state_key) if trials.stage == "fit" else None
        if saved is not None:
            self.optimal_batch_size = saved.get("optimal_batch_size")
            if self.optimal_batch_size is not None:
                set_attribute(self._batch_arg_name, self.optimal_batch_size, trials.module, trials.datamodule)
            return
        self.optimal_batch_size = find_batch_size(
            trials,
            self._mode,
            self._init_val,
            self._max_trials,
            self._steps_per_trial,
            self._batch_arg_name,
        )

    def setup(self, trainer: RunContext, module: Any, stage: str) -> None:
        refuse_unasked(self, self._was_asked)
