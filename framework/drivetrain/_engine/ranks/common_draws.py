"""Lets hooks between steps draw the same random numbers on all ranks, so that weights drawn there stay equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drivetrain._loops.hooks import Call, HookTable, is_users_hook
from drivetrain._runtime.generators import generators_restorer
from drivetrain._runtime.seed import derive_seed, seed_generators_of

_SALT = 0x686F6F6B  # separates these seeds from others that derive from the same seed

_BETWEEN_STEPS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_end", "on_fit_end"),
)


def draw_in_common(table: HookTable, trainer: Any) -> None:
    """Wrap the user's hooks between steps. With a single rank, there is nothing to wrap.

    Within steps and loaders, ranks draw different numbers, for dropout and augmentations. A hook that initializes a
    layer again would therefore give each rank weights of its own, which DDP would keep apart for the rest of the run.

    Args:
        table: the hooks.
        trainer: the `Fit`.
    """

    def wrap(name: str, number: int, call: Call) -> Call:
        return _InCommon(call, trainer, _BETWEEN_STEPS.index(name), number) if is_users_hook(call) else call

    table.wrap(_BETWEEN_STEPS, wrap)


class EarlyDraws:
    """The random numbers of a seeded run's hooks before the first batch: those that a single process would draw.

    Create it on every rank where the generators still have the same states on all ranks.

    Args:
        device: the device whose generator is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._restore = generators_restorer(device)

    def call(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        """Call the hook with these random numbers. If it seeds torch, the generators stay as the hook leaves them."""
        restore_own = generators_restorer(self._device)
        self._restore()
        seed = torch.initial_seed()
        result = hook(*arguments)
        self._restore = generators_restorer(self._device)
        if torch.initial_seed() == seed:
            restore_own()
        return result


class _InCommon:
    """Calls a hook with generators that have the same state on all ranks, and restores this rank's afterwards.

    The states depend only on the run's seed and the position in training, so a checkpoint need not contain them. Before
    the first batch they are those of `EarlyDraws`. If the hook seeds torch, the generators stay as the hook leaves
    them.
    """

    def __init__(self, call: Callable[..., Any], trainer: Any, event: int, number: int) -> None:
        self.func = call  # the name by which a profiler finds the hook's owner
        self._trainer = trainer
        self._key = event, number

    def __call__(self, *arguments: Any) -> Any:
        run = self._trainer.run_state
        progress, early_draws = run.progress, run.callbacks.early_draws
        if early_draws is not None and not progress.micro_batches:
            return early_draws.call(self.func, *arguments)
        seed = derive_seed(_SALT, run.data.seed, progress.epoch, progress.micro_batches, *self._key)
        device = self._trainer.strategy.device
        restore = generators_restorer(device)
        seed_generators_of(device, seed)
        result = self.func(*arguments)
        if torch.initial_seed() == seed:
            restore()
        return result
