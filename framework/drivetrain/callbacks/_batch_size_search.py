"""Searches for the largest batch size whose steps fit into the memory of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain._config.argument_checks import check_choice, check_count
from drivetrain._runtime.transfer import samples_in
from drivetrain.callback import Callback
from drivetrain.callbacks._tuned_attributes import find_holders, set_attribute
from drivetrain.data._loader_copy import resized
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext, Trials

MODES = ("power", "binsearch")


class FirstBatchSize(Callback):
    """Records the number of samples in a trial's first micro-batch, as the maximum over the ranks."""

    def __init__(self) -> None:
        self.samples: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def on_train_batch_end(
        self, trainer: RunContext, module: Any, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        if self.samples is None:  # The shares of two ranks differ by at most one sample.
            self.samples = -(-trainer.samples_seen // trainer.strategy.data_world_size)

    # In an evaluation, a rank without data runs no batch hooks. The maximum over ranks is therefore computed in the
    # hooks at the end, which every rank runs.

    def on_validation_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._record(batch)

    def on_test_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._record(batch)

    def on_predict_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._record(batch)

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        self._reduce(trainer)

    def on_test_end(self, trainer: RunContext, module: Any) -> None:
        self._reduce(trainer)

    def on_predict_end(self, trainer: RunContext, module: Any) -> None:
        self._reduce(trainer)

    def _record(self, batch: Any) -> None:
        if self.samples is None:
            self.samples = samples_in(batch) or 0

    def _reduce(self, trainer: RunContext) -> None:
        strategy = trainer.strategy
        self.samples = int(strategy.reduce(torch.tensor(self.samples or 0, device=strategy.device), "max"))


def find_batch_size(
    trials: Trials, mode: str, init_val: int, max_trials: int, steps_per_trial: int, batch_arg_name: str
) -> int:
    """Find the largest batch size that fits into the memory of every rank, and set the attribute to it.

    Raises:
        ConfigurationError: the batch size cannot be changed, or even the smallest size does not fit.
    """
    check_batch_size_arguments(mode, init_val, max_trials, steps_per_trial)
    _check_resizable(trials, batch_arg_name)
    trials.declare_tuned(batch_arg_name)
    available: int | None = None

    def fits(size: int) -> bool:
        nonlocal available

        def prepare(module: Any, datamodule: Any, loaders: Any) -> Any:
            set_attribute(batch_arg_name, size, module, datamodule)
            return loaders if loaders is None else resized(loaders, size)

        first_batch = FirstBatchSize()
        if not trials.fits(first_batch, steps_per_trial, prepare):
            return False
        if first_batch.samples is not None and first_batch.samples > size:
            raise ConfigurationError(
                f"{batch_arg_name}={size}, but the first batch holds {first_batch.samples} samples.",
                "the loader does not use that attribute, or the samples are not in the batch's first dimension, so "
                "the search cannot control the batch size.",
                f"build the loader with batch_size=self.{batch_arg_name}, or choose the size by hand.",
            )
        if first_batch.samples is not None and 0 < first_batch.samples < size:
            available = first_batch.samples
        return True

    # A loader takes no NumPy integer.
    size = search_largest(fits, mode, int(init_val), max_trials, lambda: available)
    set_attribute(batch_arg_name, size, trials.module, trials.datamodule)
    suffix = "" if available is None else ", which is the number of samples that a rank has"
    trials.log_info("The largest batch size that fits is %d%s.", size, suffix)
    return size


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


def _check_resizable(trials: Trials, name: str) -> None:
    loaders, stage = trials.loaders, trials.stage
    if loaders is None:
        if not find_holders(name, trials.module, trials.datamodule):
            owners = [type(owner).__name__ for owner in (trials.module, trials.datamodule) if owner is not None]
            raise ConfigurationError(
                f"{' and '.join(owners)} have no attribute {name!r}, nor a hyper-parameter of that name."
                if len(owners) > 1
                else f"{owners[0]} has no attribute {name!r}, nor a hyper-parameter of that name.",
                "each trial sets that attribute before the loader is built.",
                f"set self.{name} = ... and build the loader with it, or name another attribute: batch_arg_name=.",
            )
        return
    if not isinstance(loaders, DataLoader):
        raise ConfigurationError(
            f"The batch size of a {type(loaders).__name__}, passed to {stage}, cannot be changed.",
            "only a DataLoader can be rebuilt with another batch size.",
            f"pass one DataLoader, or a data module that builds its loaders with self.{name}.",
        )
    if loaders.batch_size is None or type(loaders.batch_sampler) is not BatchSampler:
        reason = "without a batch_size" if loaders.batch_sampler is None else "with a custom batch_sampler"
        loader = f"{type(loaders).__name__} of {type(loaders.dataset).__name__}"
        raise ConfigurationError(
            f"The batch size of a {loader} {reason}, passed to {stage}, cannot be changed.",
            "the dataset or the batch_sampler determines how large the batches are.",
            f"give the loader a batch_size, or pass a data module that builds its loaders with self.{name}.",
        )


def check_batch_size_arguments(mode: str, init_val: int, max_trials: int, steps_per_trial: int) -> None:
    """Validate the arguments of a batch size search.

    Raises:
        ConfigurationError: an argument is invalid. The message names the argument.
    """
    check_choice("scale_batch_size", "mode", mode, MODES, "the order in which sizes are tried")
    counts = {"init_val": init_val, "max_trials": max_trials, "steps_per_trial": steps_per_trial}
    for name, value in counts.items():
        check_count("scale_batch_size", name, value, 1, "a number of samples, trials or steps")
