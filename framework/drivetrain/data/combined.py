"""Several loaders at once: which of them gives a batch in which step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.data.feeds import sized
from drivetrain.data.sharding import START, Origin, Share
from drivetrain.data.source import BatchSource
from drivetrain.errors import ConfigurationError, nearest

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")

# Stands for how often a loader starts again within an epoch, where that cannot be known before.
_MANY_PASSES = 2**16


class CombinedLoader:
    """Iterates several loaders at once; the batch has the structure they were given in.

    Of the samples in such a batch, those of the first loader count: they are the micro-batch's weight, and decide
    whether a rank joins.

    Args:
        iterables: a dict, list or tuple of loaders, nested if need be.
        mode: ``"min_size"`` ends with the shortest; ``"max_size_cycle"`` ends with the longest and starts the others
            again; ``"max_size"`` ends with the longest and gives None for those that are through; ``"sequential"``
            goes through one after the other.

    Raises:
        ConfigurationError: an unknown mode, or no loader.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ConfigurationError(
                f"CombinedLoader(mode={mode!r}) is unknown.{nearest(str(mode), MODES)}",
                f"the modes are {', '.join(MODES)}",
                "pass one of them",
            )
        if not isinstance(iterables, Mapping | list | tuple):
            iterables = [iterables]
        self.iterables = iterables
        self.mode = mode
        self.flattened: list[Any] = leaves(iterables)
        if not self.flattened:
            raise ConfigurationError(
                f"CombinedLoader({iterables!r}) holds no loader", "there is nothing to iterate", "pass at least one"
            )

    def __len__(self) -> int:
        length = combined_length([sized(loader) for loader in self.flattened], self.mode)
        if length is None:
            raise TypeError("one of the combined loaders has no length")
        return length

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx), as Lightning does; the last is 0 but for ``"sequential"``."""
        parts = [_Part(sized(loader), _opener(loader)) for loader in self.flattened]
        if self.mode == "sequential":
            for index, part in enumerate(parts):
                for number, batch in enumerate(part.open(0, 0)):
                    yield batch, number, index
            return
        for number, row in enumerate(_rows(parts, self.mode, 0)):
            yield _filled(self.iterables, iter(row)), number, 0


def is_collection(value: Any) -> bool:
    """Tell whether ``value`` is a collection of loaders rather than one iterable of batches."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and any(is_loader(entry) for entry in value)


def is_loader(value: Any) -> bool:
    """Tell whether ``value`` is a loader rather than a batch, which may well be iterable too."""
    if isinstance(value, DataLoader | CombinedLoader):
        return True
    if isinstance(value, Tensor | Mapping | list | tuple | str | bytes) or not hasattr(value, "__iter__"):
        return False
    # A batch of a class of its own moves to a device, or turns into an array.
    return not hasattr(value, "to") and not hasattr(value, "__array__")


class CombinedSource:
    """Prepared loaders, combined: see `CombinedLoader` and `BatchSource`.

    Args:
        loader: the combined loader.
        sources: one for each of its ``flattened`` loaders.
    """

    def __init__(self, loader: CombinedLoader, sources: Sequence[BatchSource]) -> None:
        self._loader = loader
        self._sources = sources
        self.static = all(source.static for source in sources)
        known = [source.samples for source in sources if source.samples is not None]
        self.samples = sum(known) if len(known) == len(sources) else None
        self.length = combined_length([source.length for source in sources], loader.mode)
        self.in_process = any(source.in_process for source in sources)
        self.stateful = any(source.stateful for source in sources)
        self.stride = sources[0].stride if loader.mode != "sequential" else None
        self.lasting = all(source.lasting for source in sources)

    def shares(self, epoch: int, start: int = 0, origin: Origin = START) -> None:
        """Which loader a share comes from shows as they are read."""
        return

    def epoch(self, epoch: int, start: int = 0, origin: Origin = START) -> Iterator[tuple[Any, Share]]:
        if origin.samples:
            raise ConfigurationError(
                f"{len(self._sources)} combined loaders cannot go on within an epoch at another world size or batch "
                "size.",
                "each of them stands elsewhere in its own order.",
                "resume on as many ranks with the same batch sizes, or from a checkpoint at an epoch's end.",
            )
        if self._loader.mode == "sequential":
            return self._one_by_one(epoch, start)
        return self._together(epoch, start)

    def state_dict(self) -> dict[str, Any]:
        return {"sources": [source.state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(saved)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _one_by_one(self, epoch: int, start: int) -> Iterator[tuple[Any, Share]]:
        left = list(self._sources)
        while len(left) > 1 and left[0].length is not None and start >= left[0].length:
            start -= left.pop(0).length or 0
        if left[0].length is not None:
            # Started here and not with the first batch, as other sources are.
            first, start = left.pop(0).epoch(epoch, start), 0
        else:
            first = left.pop(0).epoch(epoch)
        return islice(chain(first, self._rest(left, epoch)), start, None)

    @staticmethod
    def _rest(sources: Sequence[BatchSource], epoch: int) -> Iterator[tuple[Any, Share]]:
        for source in sources:
            yield from source.epoch(epoch)

    def _together(self, epoch: int, start: int) -> Iterator[tuple[Any, Share]]:
        parts = []
        for source in self._sources:
            passes = 1
            if self._loader.mode == "max_size_cycle":
                known = source.length is not None and self.length is not None
                passes = -(-self.length // source.length) if known else _MANY_PASSES  # type: ignore[operator]
            parts.append(_Part(source.length, _source_opener(source, epoch * passes)))
        return self._batches(_rows(parts, self._loader.mode, start))

    def _batches(self, rows: Iterator[list[Any]]) -> Iterator[tuple[Any, Share]]:
        for row in rows:
            share = next(pair[1] for pair in row if pair is not None)
            batches = iter([None if pair is None else pair[0] for pair in row])
            yield _filled(self._loader.iterables, batches), share


class _Part(NamedTuple):
    """A loader among others: its length, and how to start its n-th pass at a batch."""

    length: int | None
    open: Callable[[int, int], Iterator[Any]]


def combined_length(lengths: Sequence[int | None], mode: str) -> int | None:
    """Return how many batches loaders of these lengths give together; None where that is not known."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    if mode == "sequential":
        return sum(known)
    return min(known) if mode == "min_size" else max(known)


def _rows(parts: Sequence[_Part], mode: str, start: int) -> Iterator[list[Any]]:
    """Start every part, and return what they give in each step from ``start`` on."""
    cycles = mode == "max_size_cycle"
    steps = combined_length([part.length for part in parts], mode)
    passes, ended, running = [0] * len(parts), [False] * len(parts), []
    for index, part in enumerate(parts):
        offset = start
        if steps is None or part.length is None:
            offset = 0
        elif start >= part.length:
            ended[index] = True
            if cycles:
                passes[index], offset = divmod(start, part.length)
        running.append(iter(()) if ended[index] and not cycles else part.open(passes[index], offset))
    if steps is None:
        # Where a length is unknown there is no telling where a later step stands in each part.
        return islice(_stepped(parts, mode, running, passes, ended), start, None)
    return islice(_stepped(parts, mode, running, passes, ended), max(0, steps - start))


def _stepped(
    parts: Sequence[_Part], mode: str, running: list[Iterator[Any]], passes: list[int], ended: list[bool]
) -> Iterator[list[Any]]:
    while True:
        row = []
        for index, part in enumerate(parts):
            try:
                row.append(next(running[index]))
                continue
            except StopIteration:
                ended[index] = True
            if mode == "min_size" or all(ended):
                return
            running[index] = iter(())
            if mode == "max_size_cycle":
                passes[index] += 1
                running[index] = part.open(passes[index], 0)
            row.append(next(running[index], None))
        yield row


def _opener(loader: Any) -> Callable[[int, int], Iterator[Any]]:
    return lambda _, offset: islice(iter(loader), offset, None)


def _source_opener(source: BatchSource, first: int) -> Callable[[int, int], Iterator[Any]]:
    # Each pass is an epoch of its own, so that a loader that starts again is shuffled again.
    return lambda number, offset: source.epoch(first + number, offset)


def leaves(tree: Any) -> list[Any]:
    """Return the loaders of a collection, from left to right."""
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for value in values for leaf in (leaves(value) if is_collection(value) else [value])]


def _filled(tree: Any, values: Iterator[Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _filled(value, values) if is_collection(value) else next(values) for key, value in tree.items()}
    filled = [_filled(value, values) if is_collection(value) else next(values) for value in tree]
    return filled if isinstance(tree, list) else tuple(filled)
