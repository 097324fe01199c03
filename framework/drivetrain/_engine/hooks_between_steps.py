"""What the user's hooks between steps need on several ranks: common random numbers, and the weights of the module.

Where ranks hold the same weights, such hooks draw the same random numbers on all ranks. Within steps and loaders, ranks
draw different numbers, for dropout and augmentations. A hook that initializes a layer again would therefore give each
rank weights of its own, which DDP would keep apart for the rest of the run. Where ranks hold shards, the strategy lets
such hooks call the module.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from drivetrain._loops.hooks import HookTable
from drivetrain._runtime.seed import derive_seed, seed_generators
from drivetrain.strategies.strategy import Strategy

_SALT = 0x686F6F6B  # separates these seeds from others that derive from the same seed

_BETWEEN_STEPS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_end", "on_fit_end"),
)


_OUTSIDE_OF_STEPS = (
    *_BETWEEN_STEPS,
    *("on_train_batch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *(f"on_{stage}_{event}" for stage in ("test", "predict") for event in ("start", "epoch_start", "epoch_end", "end")),
    *(f"on_{stage}_{event}" for stage in ("test", "predict") for event in ("batch_start", "batch_end")),
)


def wrap_hooks_between_steps(table: HookTable, trainer: Any) -> HookTable:
    """Wrap the user's hooks between steps as the strategy needs it; return ``table``.

    Args:
        table: the hooks.
        trainer: the `Fit`.
    """
    strategy = trainer.strategy
    if not strategy.shards_parameters:
        names, wrap = _BETWEEN_STEPS, partial(_InCommon, trainer)
    elif type(strategy).hook_context is not Strategy.hook_context:
        names, wrap = _OUTSIDE_OF_STEPS, partial(_InContext, strategy)
    else:
        return table
    for event, name in enumerate(names):
        for calls in (table.early, table.late):
            calls[name] = tuple(
                wrap(call, event, number) if _is_users(call) else call for number, call in enumerate(calls[name])
            )
    return table


def _is_users(call: Callable[..., Any]) -> bool:
    owner = getattr(getattr(call, "func", call), "__self__", None)
    return not type(owner).__module__.startswith(("drivetrain.", "drivetrain_strategies."))


class _InCommon:
    """Calls a hook with generators that have the same state on all ranks, and restores this rank's afterwards.

    The states depend only on the run's seed and the position in training, so a checkpoint need not contain them. If the
    hook seeds torch, the generators stay as the hook leaves them.
    """

    def __init__(self, trainer: Any, call: Callable[..., Any], event: int, number: int) -> None:
        self.func = call  # the name by which a profiler finds the hook's owner
        self._trainer = trainer
        self._key = event, number

    def __call__(self, *arguments: Any) -> Any:
        session = self._trainer.session
        progress = session.core.progress
        seed = derive_seed(_SALT, session.data.seed, progress.epoch, progress.micro_batches, *self._key)
        restore = _generators_restorer(self._trainer.strategy.device)
        seed_generators(seed)
        result = self.func(*arguments)
        if torch.initial_seed() == seed:
            restore()
        return result


class _InContext:
    """Calls a hook within the strategy's context for hooks."""

    def __init__(self, strategy: Strategy, call: Callable[..., Any], *_: int) -> None:
        self.func = call
        self._strategy = strategy

    def __call__(self, *arguments: Any) -> Any:
        with self._strategy.hook_context():
            return self.func(*arguments)


def _generators_restorer(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the present states of the generators of Python, torch, ``device`` and NumPy."""
    python, host, numpy = random.getstate(), torch.get_rng_state(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(host)
        if numpy is not None:
            numpy.random.set_state(arrays)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    return restore
