"""BatchSizeFinder: finds the largest batch size whose steps fit into the memory of every rank, before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain._data.loader_copy import resized
from drivetrain._runtime.transfer import samples_in
from drivetrain.callback import Callback
from drivetrain.callbacks._finder import Finder, find_holders, set_attribute
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.callback import Trials
    from drivetrain.run_context import RunContext

_MODES = ("power", "binsearch")


@dataclass(eq=False, repr=False)
class BatchSizeFinder(Finder):
    """Tries increasing batch sizes before a run, and sets the largest size that fits into the memory of every rank.

    The data module, or the module, must build its loaders with the attribute ``batch_arg_name``, which the search sets.
    Trials run on copies, so only that attribute changes. The result is in `optimal_batch_size`.

    A run that resumes from a checkpoint searches too.

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

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"

    def __post_init__(self) -> None:
        check_types(BatchSizeFinder, vars(self))
        check_choice("BatchSizeFinder", "mode", self.mode, _MODES, "the order in which sizes are tried")
        for name in ("init_val", "max_trials", "steps_per_trial"):
            check_count("BatchSizeFinder", name, getattr(self, name), 1, "a number of samples, trials or steps")
        self.optimal_batch_size: int | None = None
        """The batch size per rank that was found; None before a search."""

    def before_launch(self, trials: Trials) -> None:
        """Search before any run, unless it is a dry run."""
        if trials.loaders is not None and not trials.is_dry_run:
            raise ConfigurationError(
                f"BatchSizeFinder does not work with loaders passed to {trials.stage}.",
                "these loaders cannot be rebuilt for the run with the batch size that the search finds.",
                f"pass a data module that builds its loaders with self.{self.batch_arg_name}, or call "
                "Tuner(fit).scale_batch_size before.",
            )
        super().before_launch(trials)

    def search(self, trials: Trials) -> int:
        """Search, and set the attribute to the size that is found. A collective operation.

        Raises:
            ConfigurationError: the batch size cannot be changed, or even the smallest size does not fit.
        """
        self._check_resizable(trials)
        trials.declare_tuned(self.batch_arg_name)
        available: int | None = None

        def fits(size: int) -> bool:
            nonlocal available

            def prepare(module: Any, datamodule: Any, loaders: Any) -> Any:
                set_attribute(self.batch_arg_name, size, module, datamodule)
                return loaders if loaders is None else resized(loaders, size)

            first_batch = _FirstBatchSize()
            if not trials.fits(first_batch, self.steps_per_trial, prepare):
                return False
            if first_batch.samples is not None and first_batch.samples > size:
                raise ConfigurationError(
                    f"{self.batch_arg_name}={size}, but the first batch holds {first_batch.samples} samples.",
                    "the loader does not use that attribute, or the samples are not in the batch's first dimension, so "
                    "the search cannot control the batch size.",
                    f"build the loader with batch_size=self.{self.batch_arg_name}, or choose the size by hand.",
                )
            if first_batch.samples is not None and 0 < first_batch.samples < size:
                available = first_batch.samples
            return True

        # A loader takes no NumPy integer.
        size = search_largest(fits, self.mode, int(self.init_val), self.max_trials, lambda: available)
        set_attribute(self.batch_arg_name, size, trials.module, trials.datamodule)
        suffix = "" if available is None else ", which is the number of samples that a rank has"
        trials.log_info("The largest batch size that fits is %d%s.", size, suffix)
        self.optimal_batch_size = size
        return size

    def _check_resizable(self, trials: Trials) -> None:
        loaders, name = trials.loaders, self.batch_arg_name
        if loaders is None:
            if not find_holders(name, trials.module, trials.datamodule):
                raise ConfigurationError(
                    f"Neither the module nor a data module has an attribute or hyper-parameter {name!r}.",
                    "each trial sets that attribute before the loader is built.",
                    f"set self.{name} = ... and build the loader with it, or name another attribute: batch_arg_name=.",
                )
            return
        is_plain = isinstance(loaders, DataLoader) and type(loaders.batch_sampler) is BatchSampler
        if not is_plain or loaders.batch_size is None:
            raise ConfigurationError(
                f"The batch size of what was passed to {trials.stage}, a {type(loaders).__name__}, cannot be changed.",
                "only a DataLoader with a batch_size can be rebuilt with another one.",
                f"pass one with a batch_size, or a data module that builds its loaders with self.{name}.",
            )


class _FirstBatchSize(Callback):
    """Records the number of samples in a trial's first micro-batch, as the maximum over the ranks."""

    _saved_attributes = ("samples",)

    def __init__(self) -> None:
        self.samples: int | None = None

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.samples is None:  # The shares of two ranks differ by at most one sample.
            self.samples = -(-trainer.samples_seen // trainer.strategy.data_world_size)

    def on_validation_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.samples is None:
            self.samples = samples_in(batch) or 0

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        # A rank without data runs no batch hooks, but all ranks run this one.
        strategy = trainer.strategy
        self.samples = int(strategy.reduce(torch.tensor(self.samples or 0, device=strategy.device), "max"))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_end = on_predict_end = on_validation_end


def search_largest(
    fits: Callable[[int], bool], mode: str, init_val: int, max_trials: int, available: Callable[[], int | None]
) -> int:
    """Return the largest size that was tried and fits.

    Args:
        fits: a function that tries a size and returns whether this size fits.
        mode: "power" doubles the size until a size does not fit. "binsearch" then searches between the last two sizes.
        init_val: the first size. If it does not fit, sizes are halved until one fits.
        max_trials: the maximum number of sizes to try.
        available: a function that returns the number of samples that a rank has, or None until a trial has revealed
            this number. Larger sizes make no difference.

    Raises:
        ConfigurationError: none of the sizes fits.
    """
    lower, upper, size = 0, None, init_val
    for _ in range(max_trials):
        if fits(size):
            lower, limit = size, available()
            if limit is not None and limit <= lower:
                return limit
        else:
            upper = size
        if upper is None:
            size = 2 * lower
        elif lower and mode == "power":
            break
        else:
            size = (lower + upper) // 2
        if size == lower:  # No size is left between lower and upper.
            break
    if lower == 0:
        raise ConfigurationError(
            f"Not even batch size {upper} fits in memory.",
            "every size that was tried ran out of memory.",
            "use a smaller model, a sharded strategy or activation checkpointing, or raise max_trials.",
        )
    return lower
