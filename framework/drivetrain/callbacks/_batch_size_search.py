"""The search for the largest batch size whose steps fit the memory of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from drivetrain._runtime.transfer import samples_in
from drivetrain.callback import Callback
from drivetrain.callbacks._tuned_attributes import holders_of, set_attribute
from drivetrain.data._loader_copy import resized
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext, Trials

MODES = ("power", "binsearch")


class FirstBatch(Callback):
    """Notes how many samples the first micro-batch of a trial has, on the rank where it has most."""

    def __init__(self) -> None:
        self.samples: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.samples = state_dict["samples"]

    def on_train_batch_end(
        self, trainer: RunContext, module: Any, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        if self.samples is None:  # the global batch is dealt in parts that differ by one at most
            self.samples = -(-trainer.samples_seen // trainer.strategy.data_world_size)

    # In evaluation a rank without data runs nothing: what it found is settled at the end, where all come.

    def on_validation_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look_at(batch)

    def on_test_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look_at(batch)

    def on_predict_batch_start(
        self, trainer: RunContext, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._look_at(batch)

    def on_validation_end(self, trainer: RunContext, module: Any) -> None:
        self._settle(trainer)

    def on_test_end(self, trainer: RunContext, module: Any) -> None:
        self._settle(trainer)

    def on_predict_end(self, trainer: RunContext, module: Any) -> None:
        self._settle(trainer)

    def _look_at(self, batch: Any) -> None:
        if self.samples is None:
            self.samples = samples_in(batch) or 0

    def _settle(self, trainer: RunContext) -> None:
        strategy = trainer.strategy
        self.samples = int(strategy.reduce(torch.tensor(self.samples or 0, device=strategy.device), "max"))


def find_batch_size(
    trials: Trials, mode: str, init_val: int, max_trials: int, steps_per_trial: int, batch_arg_name: str
) -> int:
    """Search the largest batch size that runs on every rank, and set the attribute that holds it.

    Raises:
        ConfigurationError: the batch size cannot be changed, or not even the smallest one fits.
    """
    check_batch_size_arguments(mode, init_val, max_trials, steps_per_trial)
    _check_changeable(trials, batch_arg_name)
    trials.searches(batch_arg_name)
    most: int | None = None

    def fits(size: int) -> bool:
        nonlocal most

        def prepare(module: Any, datamodule: Any, loaders: Any) -> Any:
            set_attribute(batch_arg_name, size, module, datamodule)
            return loaders if loaders is None else resized(loaders, size)

        first = FirstBatch()
        if not trials.fits(first, steps_per_trial, prepare):
            return False
        if first.samples is not None and first.samples > size:
            raise ConfigurationError(
                f"{batch_arg_name}={size}, and the first batch holds {first.samples} samples.",
                "the loader does not go by that attribute, or what counts as a sample is not the batch's first "
                "dimension: no batch size can be found by changing it.",
                f"build the loader with batch_size=self.{batch_arg_name}, or choose the size by hand.",
            )
        if first.samples is not None and 0 < first.samples < size:
            most = first.samples
        return True

    size = largest(fits, mode, init_val, max_trials, lambda: most)
    set_attribute(batch_arg_name, size, trials.module, trials.datamodule)
    more = "" if most is None else "; the data hold no more for a rank"
    trials.say("The batch size %d is the largest that fits%s.", size, more)
    return size


def largest(
    fits: Callable[[int], bool], mode: str, init_val: int, max_trials: int, most: Callable[[], int | None]
) -> int:
    """Return the largest size that was tried and fits.

    Args:
        fits: tries a size.
        mode: "power" doubles until one does not fit; "binsearch" goes on between the two last.
        init_val: what is tried first; halved as long as it does not fit.
        max_trials: sizes that are tried at most.
        most: the size beyond which all are the same, as far as that is known after a trial.

    Raises:
        ConfigurationError: none of those that were tried fits.
    """
    low, high, size = 0, None, init_val
    for _ in range(max_trials):
        if fits(size):
            low, whole = size, most()
            if whole is not None and whole <= low:
                return whole
        else:
            high = size
        if high is None:
            size = 2 * low
        elif low and mode == "power":
            break
        else:
            size = (low + high) // 2
        if size == low:  # nothing is left between
            break
    if low == 0:
        raise ConfigurationError(
            f"Not even batch size {high} fits in memory.",
            "every size that was tried, from the first one down, ran out of it.",
            "see what the note on a fit's own error advises: a smaller model, a sharded strategy, checkpointing; or "
            "raise max_trials.",
        )
    return low


def _check_changeable(trials: Trials, name: str) -> None:
    loaders, stage = trials.loaders, trials.stage
    if loaders is None:
        if not holders_of(name, trials.module, trials.datamodule):
            whose = [type(one).__name__ for one in (trials.module, trials.datamodule) if one is not None]
            raise ConfigurationError(
                f"{' and '.join(whose)} have no attribute {name!r}, nor a hyper-parameter of that name."
                if len(whose) > 1
                else f"{whose[0]} has no attribute {name!r}, nor a hyper-parameter of that name.",
                "it says how large the batches are that the loader is built for: each trial sets another one.",
                f"write self.{name} = ... and build the loader with it, or name another one: batch_arg_name=.",
            )
        return
    if not isinstance(loaders, DataLoader):
        raise ConfigurationError(
            f"{stage} was given a {type(loaders).__name__}, and a batch size is to be found.",
            "only a DataLoader can be built again with another one.",
            f"give one DataLoader, or a data module that builds its loaders with self.{name}.",
        )
    if loaders.batch_size is None or type(loaders.batch_sampler) is not BatchSampler:
        what = "without a batch_size" if loaders.batch_sampler is None else "with a batch_sampler of its own"
        kind = f"{type(loaders).__name__} of {type(loaders.dataset).__name__}"
        raise ConfigurationError(
            f"{stage} was given a {kind} {what}, and a batch size is to be found.",
            "how large its batches are is settled where they are made, and cannot be changed from here.",
            f"give it a batch_size, or a data module that builds its loaders with self.{name}.",
        )


def check_batch_size_arguments(mode: str, init_val: int, max_trials: int, steps_per_trial: int) -> None:
    """Refuse what no search can be made of.

    Raises:
        ConfigurationError: names the argument.
    """
    if mode not in MODES:
        raise ConfigurationError(
            f"mode={mode!r}.{nearest(str(mode), MODES)}",
            "sizes are doubled, and what lies between the last two is searched or not.",
            "use 'power' or 'binsearch'.",
        )
    counts = (("init_val", init_val), ("max_trials", max_trials), ("steps_per_trial", steps_per_trial))
    for name, value in counts:
        if type(value) is not int or value < 1:
            raise ConfigurationError(
                f"{name}={value!r}.", "it is a count of 1 or more.", f"use an int, such as {name}=2."
            )
