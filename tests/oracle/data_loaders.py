"""User code of a program: data sets, samplers and loaders in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from drivetrain.data import CombinedLoader
from oracle.nets import FEATURES, LENGTH, PADDING, VOCABULARY, Parts
from oracle.program import OWN_PARTS, Data, Program

NAMES = ("x", "y", "index")


def numbers(samples: int, on_tokens: bool, first: int = 0) -> Parts:
    """Return inputs, targets and indices of samples, which depend only on their index."""
    generator = torch.Generator().manual_seed(11)
    count = first + samples
    index = torch.arange(count)
    if on_tokens:
        words = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        labels = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        keep = torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
        labels = labels.masked_fill(torch.arange(LENGTH) >= keep, PADDING)
        return words[first:], labels[first:], index[first:]
    x = torch.randn(count, FEATURES, generator=generator)
    y = torch.randn(count, 1, generator=generator)
    return x[first:], y[first:], index[first:]


def samples_of(data: Data, on_tokens: bool) -> Parts:
    x, y, index = numbers(data.samples, on_tokens)
    for first, last in data.without_tokens:
        y[first:last] = PADDING
    if data.overflows is not None:
        x[data.overflows] = 1e30
        y *= 0.3  # small enough that no other sample overflows at the initial scale
    return x, y, index


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, data: Data, on_tokens: bool) -> None:
        self.parts = samples_of(data, on_tokens)

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(NAMES, (part[index] for part in self.parts), strict=True))


class Backwards(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))

    def __len__(self) -> int:
        return self.length


class Ragged(Sampler[list[int]]):
    """A batch sampler with batches of different sizes; its length may be wrong."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, self.data.batch
        while start < self.data.samples:
            yield list(range(start, min(start + size, self.data.samples)))
            start += size
            size = 1 + size % (self.data.batch + 1)

    def __len__(self) -> int:
        assert self.data.length_error is not None
        return max(1, len(list(iter(self))) + self.data.length_error)


def part_of_rank(data: Data, ranks: int, rank: int) -> list[int]:
    """Return the samples of an iterable data set that belong to a rank; each rank has a different number."""
    shares = [one + 1 if data.fewest_on_rank_0 else ranks - one for one in range(ranks)]
    start, stop = (data.samples * sum(shares[:bound]) // sum(shares) for bound in (rank, rank + 1))
    return list(range(start, stop))


def batches_of_rank(data: Data, ranks: int, rank: int) -> list[list[int]]:
    """Return the batches of that part; workers that share its samples make their own batches, and take turns."""
    own = part_of_rank(data, ranks, rank)
    if data.kind == "sharded":
        parts = [in_batches(own[worker :: data.workers], data.batch) for worker in range(data.workers)]
        return [part[at] for at in range(max(map(len, parts))) for part in parts if at < len(part)]
    return in_batches(own, data.batch)


def in_batches(indices: list[int], size: int) -> list[list[int]]:
    return [indices[first : first + size] for first in range(0, len(indices), size)]


def stated_batches(data: Data, ranks: int, rank: int) -> int:
    """Return the number of batches that a rank's loader reports; it does not account for how workers share the data."""
    return max(1, len(in_batches(part_of_rank(data, ranks, rank), data.batch)) + (data.length_error or 0))


class Stream(IterableDataset[dict[str, Tensor]]):
    """An iterable data set of whole batches; with several workers each reads every n-th one."""

    def __init__(self, data: Data, on_tokens: bool, ranks: int, rank: int) -> None:
        self.parts = samples_of(data, on_tokens)
        self.indices = part_of_rank(data, ranks, rank)
        self.batches = batches_of_rank(data, ranks, rank)
        self.reuses = data.kind == "reused"

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        kept: list[Tensor] = []
        for indices in self.batches[first::workers]:
            parts = [part[indices] for part in self.parts]
            if self.reuses:
                if not kept:
                    kept = [part.clone() for part in parts]
                # Into the same memory, as a loader with pinned buffers does.
                parts = [old[: len(part)].copy_(part) for old, part in zip(kept, parts, strict=True)]
            yield dict(zip(NAMES, parts, strict=True))


class Sharded(Stream):
    """An iterable data set of samples that its workers share."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        for index in self.indices[worker.id :: worker.num_workers]:
            yield dict(zip(NAMES, (part[index] for part in self.parts), strict=True))


class Stateful:
    """A loader of the user's own, whose next iteration continues where the loaded state says."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.position = self.first = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.position, self.first = self.first, 0
        for at, batch in enumerate(self.stream):
            if at >= self.position:
                self.position = at + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = self.first = state["position"]


def with_length(loader: Any, length: int | None) -> Any:
    """Give a data set, a sampler or a loader a length, right or wrong; for None it has no ``len``."""
    kind = type(loader)
    if length is None and not hasattr(kind, "__len__"):
        return loader
    loader.__class__ = type(kind.__name__, (kind,), {"__len__": None if length is None else lambda self: length})
    return loader


def part_loader(data: Data, on_tokens: bool, ranks: int, rank: int) -> Any:
    length = None if data.length_error is None else stated_batches(data, ranks, rank)
    if data.kind == "sharded":  # torch estimates the loader's length from this one, regardless of workers
        samples = None if length is None else length * data.batch
        shards = with_length(Sharded(data, on_tokens, ranks, rank), samples)
        return DataLoader(shards, data.batch, num_workers=data.workers)
    stream = with_length(Stream(data, on_tokens, ranks, rank), length)
    stateful = with_length(Stateful(stream), length)
    if data.kind == "stateful":
        return stateful
    if data.kind == "combined":
        return CombinedLoader({"first": DataLoader(stream, batch_size=None), "second": stateful}, "min_size")
    return DataLoader(stream, batch_size=None, num_workers=data.workers)


def training_loader(program: Program, ranks: int, rank: int) -> Any:
    data, on_tokens = program.data, program.net.on_tokens
    options: dict[str, Any] = {"num_workers": data.workers}
    if data.kind in OWN_PARTS:
        return part_loader(data, on_tokens, ranks, rank)
    dataset = Samples(data, on_tokens)
    if data.kind == "sampler":
        return DataLoader(dataset, data.batch, sampler=Backwards(data.samples), **options)
    if data.kind == "batch_sampler":
        ragged = Ragged(data) if data.length_error is not None else with_length(Ragged(data), None)
        return DataLoader(dataset, batch_sampler=ragged, **options)
    return DataLoader(dataset, data.batch, shuffle=data.shuffle, drop_last=data.drop_last, **options)


def validation_loader(program: Program, ranks: int, rank: int) -> Any:
    assert program.validation is not None
    on_tokens = program.net.on_tokens
    if program.validation.kind != "map":
        return part_loader(program.validation.data, on_tokens, ranks, rank)
    return DataLoader(Samples(program.validation.data, on_tokens), program.validation.batch)


def first_of(batch: Any) -> dict[str, Tensor]:
    """Return the first of a pair of batches, which must be equal; or the batch itself."""
    if "second" not in batch:
        return batch
    first, second = batch["first"], batch["second"]
    if "index" in first and "index" in second and first["index"].tolist() != second["index"].tolist():
        raise LookupError(f"a pair of {first['index'].tolist()} and {second['index'].tolist()}")
    return first


def parts_of(batch: dict[str, Tensor], consumes_batch: bool) -> Parts:
    """Return the parts of a batch that a step uses; ``consumes_batch`` empties the dict."""
    batch = first_of(batch)
    x, y, index = (batch.pop(name) if consumes_batch else batch[name] for name in NAMES)
    return x, y, index
