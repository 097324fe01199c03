"""Several loaders at once: which of them gives a batch in which step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.data._batch_source import BatchSource
from drivetrain.data._samplers import len_or_none
from drivetrain.data._sharding import EPOCH_START, BatchShard, ShardingOrigin
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.data._order_fingerprint import OrderFingerprint

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")

_NONE: Any = object()
"""No batch, where None may be one."""

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
        length = combined_length([len_or_none(loader) for loader in self.flattened], self.mode)
        if length is None:
            raise TypeError("one of the combined loaders has no length")
        return length

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx), as Lightning does; the last is 0 but for ``"sequential"``."""
        parts = [_Part(_opener(loader)) for loader in self.flattened]
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
        self.shards_known = all(source.shards_known for source in sources)
        known = [source.samples for source in sources if source.samples is not None]
        self.samples = sum(known) if len(known) == len(sources) else None
        self.length = combined_length([source.length for source in sources], loader.mode)
        self.length_is_exact = all(source.length_is_exact for source in sources)
        self.in_process = any(source.in_process for source in sources)
        self.stateful = any(source.stateful for source in sources)
        self.stride = sources[0].stride if loader.mode != "sequential" else None
        self.fresh_memory = all(source.fresh_memory for source in sources)
        subsets = [source.subset for source in sources]
        self.subset = None if all(subset is None for subset in subsets) else subsets

    @property
    def needs_order_check(self) -> bool:
        return any(source.needs_order_check for source in self._sources)

    def order_fingerprints(self) -> list[OrderFingerprint]:
        return [sight for source in self._sources if source.needs_order_check for sight in source.order_fingerprints()]

    def shards(self, epoch: int, start: int = 0, origin: ShardingOrigin = EPOCH_START) -> None:
        """Which loader a share comes from shows as they are read."""
        return

    def indices(self, epoch: int) -> None:
        """Each loader has its own."""
        return

    def requested_indices(self) -> None:
        """Each loader has its own."""
        return

    def epoch(
        self, epoch: int, start: int = 0, origin: ShardingOrigin = EPOCH_START
    ) -> Iterator[tuple[Any, BatchShard]]:
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

    def count(self, epoch: int) -> int | None:
        return self.length if self.length_is_exact else None

    def state_dict(self) -> dict[str, Any]:
        return {"sources": [source.state_dict() for source in self._sources]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(saved)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _one_by_one(self, epoch: int, start: int) -> Iterator[tuple[Any, BatchShard]]:
        left, length = list(self._sources), None
        while start and len(left) > 1:
            length = left[0].count(epoch)
            if length is None or start < length:
                break
            start -= length
            left.pop(0)
        if start == 0 or len(left) == 1 or length is not None:
            # Started here and not with the first batch, as other sources are.
            first, start = left.pop(0).epoch(epoch, start), 0
        else:  # it may end before that batch
            first = left.pop(0).epoch(epoch)
        return islice(chain(first, self._rest(left, epoch)), start, None)

    @staticmethod
    def _rest(sources: Sequence[BatchSource], epoch: int) -> Iterator[tuple[Any, BatchShard]]:
        for source in sources:
            yield from source.epoch(epoch)

    def _together(self, epoch: int, start: int) -> Iterator[tuple[Any, BatchShard]]:
        parts = []
        for source in self._sources:
            passes = 1
            if self._loader.mode == "max_size_cycle":
                known = self.length_is_exact and source.length
                passes = -(-self.length // source.length) if known else _MANY_PASSES  # type: ignore[operator]
            parts.append(_source_part(source, epoch * passes))
        return self._batches(_rows(parts, self._loader.mode, start))

    def _batches(self, rows: Iterator[list[Any]]) -> Iterator[tuple[Any, BatchShard]]:
        for row in rows:
            shard = next(pair[1] for pair in row if pair is not None)
            batches = iter([None if pair is None else pair[0] for pair in row])
            yield _filled(self._loader.iterables, batches), shard


class _Part(NamedTuple):
    """A loader among others.

    Attributes:
        open: starts its n-th pass at a batch.
        length: of a pass, where that is certain.
        length_of: how long its n-th pass is, where that can be told.
    """

    open: Callable[[int, int], Iterator[Any]]
    length: int | None = None
    length_of: Callable[[int], int | None] = lambda number: None


def combined_length(lengths: Sequence[int | None], mode: str) -> int | None:
    """Return how many batches loaders of these lengths give together; None where that is not known."""
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return None
    if mode == "sequential":
        return sum(known)
    return min(known) if mode == "min_size" else max(known)


class _Place(NamedTuple):
    """Where a loader stands in some step: in which pass, at which batch, and whether one has come to its end."""

    number: int = 0
    offset: int = 0
    ended: bool = False


def _rows(parts: Sequence[_Part], mode: str, start: int) -> Iterator[list[Any]]:
    """Start every part, and return what they give in each step from ``start`` on."""
    cycles = mode == "max_size_cycle"
    steps = combined_length([part.length for part in parts], mode)
    found = [_place(part, start, cycles) for part in parts]
    places = [place for place in found if place is not None]
    if len(places) < len(parts):
        # There is no telling where each part stands then.
        return islice(_rows(parts, mode, 0), start, None)
    if _over([place.ended for place in places], mode):
        return iter(())
    running = [
        iter(()) if place.ended and not cycles else part.open(place.number, place.offset)
        for part, place in zip(parts, places, strict=True)
    ]
    rows = _stepped(parts, mode, places, running)
    # Where all lengths are certain nobody is asked for a batch that is not there.
    return rows if steps is None else islice(rows, max(0, steps - start))


def _place(part: _Part, start: int, cycles: bool) -> _Place | None:
    """Return where a part stands at step ``start``; None where that cannot be told."""
    number, offset = 0, start
    while offset:
        length = part.length_of(number)
        if not length:
            return None
        if offset < length:
            break
        if not cycles:
            return _Place(ended=True)
        number, offset = number + 1, offset - length
    return _Place(number, offset, ended=number > 0)


def _stepped(
    parts: Sequence[_Part], mode: str, places: Sequence[_Place], running: list[Iterator[Any]]
) -> Iterator[list[Any]]:
    cycles = mode == "max_size_cycle"
    passes, ended = [place.number for place in places], [place.ended for place in places]
    while True:
        row: list[Any] = []
        missing = []
        for index, batches in enumerate(running):
            row.append(next(batches, _NONE))
            if row[index] is _NONE:
                missing.append(index)
                ended[index] = True
                if mode == "min_size":
                    return
        if _over(ended, mode):  # before any of them starts again for nothing
            return
        for index in missing:
            running[index], row[index] = iter(()), None
            if cycles:
                passes[index] += 1
                running[index] = parts[index].open(passes[index], 0)
                row[index] = next(running[index], None)
        yield row


def _over(ended: Sequence[bool], mode: str) -> bool:
    return any(ended) if mode == "min_size" else all(ended)


def _opener(loader: Any) -> Callable[[int, int], Iterator[Any]]:
    return lambda _, offset: islice(iter(loader), offset, None)


def _source_part(source: BatchSource, first: int) -> _Part:
    # Each pass is an epoch of its own, so that a loader that starts again is shuffled again.
    return _Part(
        lambda number, offset: source.epoch(first + number, offset),
        source.length if source.length_is_exact else None,
        lambda number: source.count(first + number),
    )


def leaves(tree: Any) -> list[Any]:
    """Return the loaders of a collection, from left to right."""
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for value in values for leaf in (leaves(value) if is_collection(value) else [value])]


def _filled(tree: Any, values: Iterator[Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _filled(value, values) if is_collection(value) else next(values) for key, value in tree.items()}
    filled = [_filled(value, values) if is_collection(value) else next(values) for value in tree]
    return filled if isinstance(tree, list) else tuple(filled)
