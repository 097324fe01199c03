"""``make fuzz COUNT=2000 SEED=...``: checks the given number of programs; prints findings as runnable scripts."""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch  # noqa: E402

from fuzz.check import Difference, check, judge  # noqa: E402
from fuzz.draw import STRATEGIES, ZERO  # noqa: E402
from fuzz.plants import PLANTS  # noqa: E402
from fuzz.program import Program  # noqa: E402
from fuzz.script import script  # noqa: E402
from fuzz.search import search  # noqa: E402
from worlds import close_worlds  # noqa: E402

PRESET_SEEDS = (1, 2, 3)
_AT_ONCE = 100  # programs that one search of Hypothesis draws


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="programs to run")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of what is drawn")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="of these, 'hsdp' or 'zero'")
    parser.add_argument("--seeds", type=int, default=len(PRESET_SEEDS), help="preset seeds that plants are tried with")
    parser.add_argument("--findings", type=int, default=1, help="end after so many")
    parser.add_argument("--plant", default="", help=f"count what finding it takes: all, or of {', '.join(PLANTS)}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    strategies = ZERO if asked.strategies == "zero" else tuple(asked.strategies.split(","))
    try:
        if asked.plant:
            names = list(PLANTS) if asked.plant == "all" else asked.plant.split(",")
            return find_plants(names, asked.count, strategies, PRESET_SEEDS[: asked.seeds])
        return find(asked.count, asked.seed, strategies, asked.findings)
    finally:
        close_worlds()


@dataclass
class Tally:
    """Checks programs, and counts the drawn ones: those that ran, and those that the engine rightly refused."""

    ran: int = 0
    refused: int = 0
    shrinks: bool = False

    def check(self, program: Program) -> None:
        self.ran += 1
        try:
            refused = check(program)
        except Difference:
            self.shrinks = True  # what is tried from now on are smaller programs
            raise
        self.refused += refused and not self.shrinks


def find(count: int, seed: int, strategies: tuple[str, ...], findings: int) -> int:
    """Run ``count`` programs and print the differences; returns the number of findings."""
    print(f"COUNT={count} SEED={seed}, under {', '.join(strategies)}", flush=True)
    began, found, done, refused = time.monotonic(), 0, 0, 0
    while done < count and found < findings:
        size = min(_AT_ONCE, count - done)
        tally = Tally()
        # Chunks are drawn independently: a long Hypothesis search concentrates on programs that it has already tried.
        one = search(size, seed * 1_000_003 + done, strategies, attempt=tally.check)
        refused += tally.refused
        if one is None:
            done += tally.ran
        else:
            program, text, first = one
            done += first
            found += 1
            print(script(program, text), flush=True)
    took = time.monotonic() - began
    print(f"{done} programs, {refused} refused, {found} findings ({took:.0f} s)", flush=True)
    return found


def find_plants(names: list[str], count: int, strategies: tuple[str, ...], seeds: tuple[int, ...]) -> int:
    """Count the programs needed to find each planted defect; returns how many defects were not found."""
    missed = 0
    for name in names:
        for seed in seeds:
            began = time.monotonic()
            done, first = 0, 0
            text = ""
            while done < count and not first:
                size = min(_AT_ONCE, count - done)
                attempt = functools.partial(check_with, name)
                one = search(size, seed * 1_000_003 + done, strategies, shrinks=False, attempt=attempt)
                if one is not None:
                    first, text = done + one[2], one[1]
                done += size
            missed += not first
            said = f"found by program {first}: {text[:150]}" if first else f"not found in {done}"
            print(f"{name}, seed {seed}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return missed


def check_with(plant: str, program: Program) -> None:
    """Check ``program`` with a planted defect; failures that also occur without it do not count."""
    try:
        check(program, plant)
    except Difference:
        if not judge(program).found:
            raise


if __name__ == "__main__":
    sys.exit(main())
