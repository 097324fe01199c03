"""BatchSizeFinder: finds the largest batch size that fits into memory before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.callbacks._finder import Finder
from drivetrain.callbacks._tuned_attributes import set_attribute
from drivetrain.callbacks.batch_size_search import BatchSizeSearch
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import Trials


class BatchSizeFinder(Finder):
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

    _saved_attributes = ("optimal_batch_size",)

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
    ) -> None:
        self._search = BatchSizeSearch(mode, init_val, max_trials, steps_per_trial, batch_arg_name)
        self.optimal_batch_size: int | None = None
        """The batch size per rank that was found; None before a search."""

    def before_launch(self, trials: Trials) -> None:
        """Search before any run, unless it is a dry run."""
        if trials.loaders is not None and not trials.is_dry_run:
            raise ConfigurationError(
                f"BatchSizeFinder does not work with loaders passed to {trials.stage}.",
                "these loaders cannot be rebuilt for the run with the batch size that the search finds.",
                f"pass a data module that builds its loaders with self.{self._search.batch_arg_name}, or call "
                "Tuner(fit).scale_batch_size before.",
            )
        super().before_launch(trials)

    def search(self, trials: Trials) -> None:
        """Search, and set the attribute to the size that is found."""
        self.optimal_batch_size = self._search.run(trials)

    def restore(self, saved: dict[str, Any], trials: Trials) -> None:
        """Set the attribute to the size of the run that is resumed."""
        self.optimal_batch_size = saved.get("optimal_batch_size")
        if self.optimal_batch_size is not None:
            set_attribute(self._search.batch_arg_name, self.optimal_batch_size, trials.module, trials.datamodule)
