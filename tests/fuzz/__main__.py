"""``make fuzz COUNT=2000 SEED=...``: checks the given number of programs; prints a finding as a runnable script."""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch  # noqa: E402

from fuzz.draw import STRATEGIES, ZERO  # noqa: E402
from fuzz.search import script, search  # noqa: E402
from oracle.check import Difference, check, judge  # noqa: E402
from oracle.planted_defects import PLANTS  # noqa: E402
from oracle.program import Program  # noqa: E402
from worlds import close_worlds  # noqa: E402

PRESET_SEEDS = (1, 2, 3)
_AT_ONCE = 20  # programs that one search of Hypothesis draws, the simplest first: a long search repeats more programs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="programs to run")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of what is drawn")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="of these, 'hsdp' or 'zero'")
    parser.add_argument("--seeds", type=int, default=len(PRESET_SEEDS), help="preset seeds that plants are tried with")
    parser.add_argument("--plant", default="", help=f"count what finding it takes: all, or of {', '.join(PLANTS)}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    strategies = ZERO if asked.strategies == "zero" else tuple(asked.strategies.split(","))
    try:
        if asked.plant:
            names = list(PLANTS) if asked.plant == "all" else asked.plant.split(",")
            return find_plants(names, asked.count, strategies, PRESET_SEEDS[: asked.seeds])
        return find(asked.count, asked.seed, strategies)
    finally:
        close_worlds()


@dataclass
class Tally:
    """Draws programs until enough different ones ran."""

    # runs one and raises `Difference`; returns whether the engine refused it, as it may
    check: Callable[[Program], bool]
    ran: int = 0  # different programs that ran, without those that the search shrank a finding to
    refused: int = 0  # those that were refused
    _passed: set[str] = field(default_factory=set)
    _shrinks: bool = False

    def search(
        self, count: int, seed: int, strategies: tuple[str, ...], shrinks: bool = True
    ) -> tuple[Program, str] | None:
        """Go on until at least ``count`` programs ran, or one of them differed; return that one, with what differs."""
        one, drawn_from = None, seed * 1_000_003
        while one is None and self.ran < count:
            one = search(_AT_ONCE, drawn_from, strategies, shrinks, self._attempt)
            drawn_from += 1
        return one

    def _attempt(self, program: Program) -> None:
        key = repr(program)
        if key in self._passed:
            return
        self.ran += not self._shrinks
        try:
            refused = self.check(program)
        except Difference:
            self._shrinks = True
            raise
        self.refused += refused and not self._shrinks
        self._passed.add(key)


def find(count: int, seed: int, strategies: tuple[str, ...]) -> int:
    """Run ``count`` different programs, until one differs, which is printed; returns the number of findings."""
    print(f"COUNT={count} SEED={seed}, under {', '.join(strategies)}", flush=True)
    began, tally = time.monotonic(), Tally(check)
    one = tally.search(count, seed, strategies)
    if one is not None:
        print(script(*one))
    found, took = int(one is not None), time.monotonic() - began
    print(f"{tally.ran} programs, {tally.refused} refused, {found} findings ({took:.0f} s)", flush=True)
    return found


def find_plants(names: list[str], count: int, strategies: tuple[str, ...], seeds: tuple[int, ...]) -> int:
    """Count the programs needed to find each planted defect; returns how many defects were not found."""
    missed = 0
    for name in names:
        for seed in seeds:
            began, tally = time.monotonic(), Tally(functools.partial(check_with, name))
            one = tally.search(count, seed, strategies, shrinks=False)
            missed += one is None
            result = f"not found in {tally.ran}" if one is None else f"found by program {tally.ran}: {one[1][:150]}"
            print(f"{name}, seed {seed}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
    return missed


def check_with(plant: str, program: Program) -> bool:
    """Check ``program`` with a planted defect; failures that also occur without it do not count."""
    try:
        return check(program, plant)
    except Difference:
        if not judge(program).found:
            raise
        return False


if __name__ == "__main__":
    sys.exit(main())
