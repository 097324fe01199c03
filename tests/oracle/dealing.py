"""The samples of each rank, implemented independently from docs/distributed.md, except for the order of an epoch."""

from __future__ import annotations

import math

import torch

from drivetrain.data import order
from oracle.data_loaders import Ragged, batches_of_rank, stated_batches
from oracle.program import OWN_PARTS, Data, Program

GlobalBatch = list[list[int]]
"""A global micro-batch: each rank's samples; none for a rank that joins."""


def epoch_order(data: Data, seed: int, epoch: int) -> list[int]:
    if data.kind == "sampler":
        return list(range(data.samples - 1, -1, -1))
    if data.kind == "map" and data.shuffle:
        indices: list[int] = order(data.samples, seed, epoch)(torch.arange(data.samples)).tolist()
        return indices
    return list(range(data.samples))


def deal(data: Data, indices: list[int], ranks: int) -> list[GlobalBatch]:
    """Deal the remaining part of an epoch's order: full global micro-batches in equal slices, the last one evenly."""
    if data.kind == "batch_sampler":
        return deal_ragged(data, indices, ranks)
    size = data.batch * ranks
    groups = [indices[start : start + size] for start in range(0, len(indices), size)]
    if data.drop_last and groups and len(groups[-1]) < size:
        groups.pop()
    return [split_evenly(group, ranks) for group in groups]


def deal_ragged(data: Data, indices: list[int], ranks: int) -> list[GlobalBatch]:
    """Combine W of the sampler's own batches into a global one; the rest is dealt evenly."""
    done = data.samples - len(indices)
    batches = [[one for one in batch if one >= done] for batch in Ragged(data)]
    batches = [batch for batch in batches if batch]
    global_batches = []
    for start in range(0, len(batches), ranks):
        group = batches[start : start + ranks]
        rest = [one for batch in group for one in batch]
        global_batches.append(group if len(group) == ranks else split_evenly(rest, ranks))
    return global_batches


def deal_streams(data: Data, ranks: int) -> list[GlobalBatch]:
    """Let each rank read its own part to its end, and then join."""
    parts = [batches_of_rank(data, ranks, rank) for rank in range(ranks)]
    longest = max(map(len, parts))
    return [[part[at] if at < len(part) else [] for part in parts] for at in range(longest)]


def deal_evaluation(samples: int, batch: int, ranks: int) -> list[GlobalBatch]:
    """Deal for evaluation: a last group with fewer samples than ranks is merged with the one before it."""
    size = batch * ranks
    groups = [list(range(start, min(samples, start + size))) for start in range(0, samples, size)]
    if len(groups) > 1 and len(groups[-1]) < ranks <= (len(groups[-2]) + len(groups[-1])) // 2:
        both = groups[-2] + groups[-1]
        middle = len(both) - len(both) // 2
        groups[-2:] = [both[:middle], both[middle:]]
    return [split_evenly(group, ranks) for group in groups]


def split_evenly(indices: list[int], ranks: int) -> GlobalBatch:
    """Yield contiguous slices whose sizes differ by at most one, with larger ones on lower ranks."""
    return [part.tolist() for part in torch.tensor_split(torch.tensor(indices, dtype=torch.int64), ranks)]


def stated_length(data: Data, ranks: int) -> int | None:
    """Return the number of micro-batches of an epoch according to the loaders; None if they do not state it."""
    if data.length_error is None:
        return None
    if data.kind in OWN_PARTS:  # the longest part ends the epoch
        return max(stated_batches(data, ranks, rank) for rank in range(ranks))
    if data.kind == "batch_sampler":
        return -(-len(Ragged(data)) // ranks)
    return len(deal(data, list(range(data.samples)), ranks))


def estimated_steps(program: Program, ranks: int) -> float:
    """Return the run's number of steps, as estimated from the lengths of loaders."""
    length = stated_length(program.data, ranks)
    steps = -(-length // program.accumulate) * program.epochs if length is not None else math.inf
    stop = program.stop
    return min(steps, stop.at) if stop is not None and stop.how == "max_steps" else steps
