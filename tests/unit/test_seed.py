from __future__ import annotations

import random
import subprocess
import sys

import numpy
import pytest
import torch

from drivetrain._runtime.process_state import ProcessState
from drivetrain._runtime.seed import derive_seed, last_seed, seed_everything, validate_seed
from drivetrain.errors import ConfigurationError


def _draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_seed_everything_repeats_all_generators() -> None:
    with ProcessState(generators=True):
        assert seed_everything(7) == 7
        first = _draws()
        other = _draws()
        seed_everything(7, workers=False)
        assert _draws() == first
        assert first != other
    assert last_seed() == 7


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "3", None, True])
def test_bad_seeds_are_refused_with_value_and_fix(seed: object) -> None:  # G-06
    with pytest.raises(ConfigurationError, match=r"(?s)seed=.*is not a seed.*Why: .*Fix: "):
        validate_seed(seed)


def test_derived_seeds_are_pinned() -> None:
    # The order of every run's samples depends on these: another hash would change all of them.
    assert derive_seed(0, 0) == 7075020478960855379
    assert derive_seed(1, 2, 3) == 6425717521400357366
    assert derive_seed() == 8099600782183737556


def test_derived_seeds_differ_by_value_order_and_number() -> None:
    parts = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (10,), (-1,), (2**70,), (1, 1), (11,), (1, 10), (11, 0)]
    seeds = [derive_seed(*each) for each in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    many = {derive_seed(3, epoch, rank) for epoch in range(100) for rank in range(100)}
    assert len(many) == 10_000


@pytest.mark.slow
def test_derived_seeds_are_the_same_in_another_process() -> None:
    # I-18: that process also detects whether it was seeded.
    code = (
        "from drivetrain._runtime.seed import derive_seed, is_unseeded; import torch; assert is_unseeded();"
        "torch.manual_seed(2); assert not is_unseeded(); print(derive_seed(5, 6))"
    )
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert int(run.stdout) == derive_seed(5, 6)


def test_torch_accepts_a_derived_seed() -> None:
    torch.Generator().manual_seed(derive_seed(1, 2))
