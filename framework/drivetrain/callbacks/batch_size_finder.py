"""BatchSizeFinder: finds the largest batch size that fits into memory before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.callbacks._batch_size_search import check_batch_size_arguments, find_batch_size
from drivetrain.callbacks._tuned_attributes import set_attribute
from drivetrain.callbacks._tuned_value import load_saved_result
from drivetrain.callbacks.learning_rate_finder import check_was_launched
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext, Trials


class BatchSizeFinder(Callback):
    """Tries increasing batch sizes before a run, and sets the largest size that fits into the memory of every rank.

    The data module, or the module, must build its loaders with the attribute ``batch_arg_name``, which the search sets.
    Trials run on copies, so only that attribute changes. The result is in `optimal_batch_size`.

    A run that resumes from the path of a checkpoint uses the size that the checkpoint contains, and does not search. A
    run with ``ckpt_path`` "auto", "last" or "best" searches, because there may be no checkpoint to resume from.

    Args:
        mode: "power" doubles the size until a size does not fit. "binsearch" then searches between the last two.
        steps_per_trial: optimizer steps per trial (micro-batches for validate, test and predict).
        init_val: the first size to try.
        max_trials: the maximum number of sizes to try.
        batch_arg_name: the attribute of the module, the data module or their hyper-parameters to set.

    Raises:
        ConfigurationError: an argument is invalid; at the start of the run, also if the attribute does not exist,
            loaders were passed directly, or even the smallest size does not fit.
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
        self._was_launched = False
        self.optimal_batch_size: int | None = None
        """The batch size per rank that was found; None before a search."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimal_batch_size": self.optimal_batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimal_batch_size = state_dict["optimal_batch_size"]

    def before_launch(self, trials: Trials) -> None:
        self._was_launched = True
        if trials.is_dry_run:
            return
        if trials.loaders is not None:
            raise ConfigurationError(
                f"BatchSizeFinder does not work with loaders passed to {trials.stage}.",
                "these loaders cannot be rebuilt for the run with the batch size that the search finds.",
                f"pass a data module that builds its loaders with self.{self._batch_arg_name}, or call "
                "Tuner(fit).scale_batch_size before.",
            )
        saved = load_saved_result(trials.ckpt_path, self.state_key) if trials.stage == "fit" else None
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
        check_was_launched(self, self._was_launched)
