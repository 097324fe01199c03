"""The seeds of a run: alike where ranks must agree, different where they must not."""

from __future__ import annotations

import torch

from drivetrain.control import ControlPlane
from drivetrain.seed import derive_seed, last_seed, seed_generators


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
