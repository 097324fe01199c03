"""Seeds the generators of each rank."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from drivetrain._runtime.seed import derive_seed, generator_was_used, is_unseeded, seed_generators
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

if TYPE_CHECKING:
    from drivetrain._engine.ranks.common_draws import EarlyDraws

_reported_unseeded = False


def seed_rank(seed: int, data_rank: int) -> None:
    """Seed Python, NumPy and torch: data rank 0 with ``seed``, the other ranks with seeds derived from ``seed``.

    With equal seeds, all ranks would draw the same dropout masks.
    """
    seed_generators(seed if data_rank == 0 else derive_seed(seed, data_rank))


def seed_data_rank(seed: int | None, order: int, strategy: Strategy) -> EarlyDraws | None:
    """Seed one of several ranks after the module was initialized, so that data ranks draw different dropout masks.

    Return what hooks draw before the first batch if they draw the same numbers as in a single process, else None.

    Args:
        seed: ``Fit(seed=)``. Without it, ranks are seeded only if several ranks read the same data, as with tensor
            parallelism: they have to draw the same dropout masks.
        order: the seed for the order of samples, which is equal on all ranks.
        strategy: the strategy, which knows the ranks.
    """
    early_draws = None
    if seed is not None:
        from drivetrain._engine.ranks.common_draws import EarlyDraws  # only runs on several ranks need it

        early_draws = EarlyDraws(strategy.device)
    if seed is not None and strategy.data_rank > 0:
        seed_rank(seed, strategy.data_rank)
    elif seed is None and strategy.data_world_size < strategy.world_size:
        seed_rank(order, strategy.data_rank)
    return early_draws


def built_unseeded(module: nn.Module) -> bool:
    """Return True once per process, if ``module``'s parameters were initialised before any generator was seeded.

    Call this function in the process that built the module, before other processes are started.
    """
    global _reported_unseeded
    unseeded = (
        not _reported_unseeded
        and is_unseeded()
        and generator_was_used()
        and next(module.parameters(), None) is not None
    )
    _reported_unseeded |= unseeded
    return unseeded


def warn_unseeded(module: nn.Module, seed: int) -> None:
    """Warn that the run's seed was set after ``module`` was initialised."""
    logger.warning(
        "Fit(seed=%d) seeds the run, but %s was built before the run with unseeded generators: the random initial "
        "weights will differ in the next run. Call drivetrain.seed_everything(%d) before the module is built, or build "
        "its layers in configure_model. This is logged once.",
        seed,
        type(module).__name__,
        seed,
    )
