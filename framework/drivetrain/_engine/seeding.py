"""The seeds of a run: alike where ranks must agree, different where they must not."""

from __future__ import annotations

import logging

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._runtime.seed import derive_seed, has_drawn, is_unseeded, last_seed, seed_generators

logger = logging.getLogger("drivetrain")

_found_unseeded = False


def order_seed(seed: int | None, control: ControlPlane) -> int:
    """Return the seed of the order of samples, the same on every rank.

    It is ``Fit(seed=)``, else `seed_everything`'s, else one drawn from rank 0's torch generator.
    """
    if seed is None:
        seed = last_seed()
    if seed is None and control.rank == 0:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
    return int(control.from_rank_0(seed))


def seed_rank(seed: int, data_rank: int) -> None:
    """Seed Python, NumPy and torch; rank 0 as ``torch.manual_seed(seed)`` would, the others apart from it.

    With equal seeds all ranks would draw the same dropout mask, which is one mask and not W.
    """
    seed_generators(seed if data_rank == 0 else derive_seed(seed, data_rank))


def built_unseeded(module: nn.Module) -> bool:
    """Tell whether ``module`` has parameters that were initialised before anything was seeded; once in a process.

    Asked in the process that built it, before others are started.
    """
    global _found_unseeded
    found = not _found_unseeded and is_unseeded() and has_drawn() and next(module.parameters(), None) is not None
    _found_unseeded |= found
    return found


def tell_of_unseeded(module: nn.Module, seed: int) -> None:
    """Say that the run's seed comes too late for what ``module`` was initialised with."""
    logger.warning(
        "Fit(seed=%d) seeds the run, and %s was built before it, in a process that nobody had seeded: what is random "
        "in its weights is different in the next run. Call drivetrain.seed_everything(%d) before it is built, or build "
        "its layers in configure_model. Said once.",
        seed,
        type(module).__name__,
        seed,
    )
