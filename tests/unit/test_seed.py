from __future__ import annotations

import random

import numpy
import pytest
import torch

from drivetrain import ConfigurationError, Fit, seed_everything

# The derivation has no public name; the order of every run's samples depends on its exact values.
from drivetrain._runtime.seed import derive_seed


def test_seed_everything_repeats_all_generators() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    assert seed_everything(7) == 7
    first, second = draws(), draws()
    seed_everything(7, workers=False)
    assert draws() == first != second


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "3", True])
def test_bad_seeds_are_refused_with_value_and_fix(seed: object) -> None:  # G-06
    with pytest.raises(ConfigurationError, match=r"(?s)seed=.*is not a seed.*Why: .*Fix: "):
        Fit(seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is not a seed"):
        seed_everything(seed)  # type: ignore[arg-type]


def test_derived_seeds_are_pinned_and_differ_by_value_order_and_number() -> None:
    assert derive_seed(0, 0) == 7075020478960855379
    assert derive_seed(1, 2, 3) == 6425717521400357366
    assert derive_seed() == 8099600782183737556
    parts = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (10,), (-1,), (2**70,), (1, 1), (11,), (1, 10), (11, 0)]
    seeds = [derive_seed(*each) for each in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
