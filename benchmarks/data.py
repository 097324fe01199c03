"""How long an epoch takes to begin, at its start and in its middle, and how much memory its order takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.slopes import spread
from benchmarks.system_memory import peak
from drivetrain._data.loaders import prepare_loader

SIZES = tuple(10**power for power in range(3, 10))
BATCH = 64
RANK, RANKS = 1, 8
HAND_LIMIT = 10**7
"""torch's samplers hold every index as an object of Python's: 36 GB of them for 10^9 samples."""


class Range(Dataset[int]):
    """A data set of ``samples`` samples that cost nothing to read."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


class Begun(NamedTuple):
    """The cost of the first batch: wall-clock and processor seconds, and the growth of the peak memory in bytes."""

    wall: float
    busy: float
    grown: float


def ours(samples: int, first: int) -> Iterator[Any]:
    loader = DataLoader(Range(samples), batch_size=BATCH, shuffle=True)
    return iter(prepare_loader(loader, training=True, rank=RANK, world_size=RANKS, seed=0).epoch(1, first))


def by_torch(samples: int, first: int) -> Iterator[Any]:
    data = Range(samples)
    sampler: DistributedSampler[Any] = DistributedSampler(data, RANKS, RANK, shuffle=True)
    sampler.set_epoch(1)
    # Skipped samples are not read, as in other resumable loaders: only their indices are iterated.
    batches = islice(DataLoader(data, batch_size=BATCH, sampler=sampler).batch_sampler, first, None)  # type: ignore[arg-type]
    return (torch.tensor([data[index] for index in batch]) for batch in batches)


WAYS: dict[str, Callable[[int, int], Iterator[Any]]] = {"drivetrain": ours, "`DistributedSampler`": by_torch}


def begin(way: str, samples: int, middle: bool) -> Begun:
    """Measure, in a process of its own, the time to an epoch's first batch, after a warm-up with another data set."""
    torch.set_num_threads(1)
    next(WAYS[way](1000, 1))
    first = samples // (BATCH * RANKS) // 2 if middle else 0
    gc.collect()
    before = peak()
    wall, busy = time.perf_counter(), time.process_time()
    next(WAYS[way](samples, first))
    return Begun(time.perf_counter() - wall, time.process_time() - busy, peak() - before)


def table(rounds: int) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"Rank {RANK} of {RANKS}, batches of {BATCH}, shuffled, no workers; {rounds} rounds; "
        "median (minimum to maximum).",
        "",
        "| Samples | Order | first batch, ms | processor, ms | from the middle, ms | processor, ms | memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.data"])
    for samples in SIZES:
        for way in WAYS:
            if way != "drivetrain" and samples > HAND_LIMIT:
                continue
            with context.Pool(1, maxtasksperchild=1) as pool:
                jobs = [(way, samples, middle) for middle in (False, True) for _ in range(rounds)]
                begun = pool.starmap(begin, jobs, chunksize=1)
            row = [f"{samples:,}", way]
            for part in (begun[:rounds], begun[rounds:]):
                row += [spread([one.wall * 1e3 for one in part], 1), spread([one.busy * 1e3 for one in part], 1)]
            row.append(f"{max(one.grown for one in begun) / 2**20:.1f}")
            lines.append(f"| {' | '.join(row)} |")
    return lines
