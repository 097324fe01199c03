"""Iterates several loaders together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain.data._batch_source import BatchSource
from drivetrain.data._samplers import len_or_none
from drivetrain.data._sharding import EPOCH_START, BatchShare, EpochOffset
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.data._order_fingerprint import OrderFingerprint

_CYCLE = "max_size_cycle"
MODES = ("min_size", _CYCLE, "max_size", "sequential")

_EXHAUSTED: Any = object()
"""Marks an exhausted loader, since None may be a batch."""

# Upper bound on the number of passes over a loader within an epoch, used if the number is unknown.
_MAX_PASSES = 2**16


class CombinedLoader:
    """Iterates several loaders together. A combined batch has the same structure as the collection of loaders.

    The number of samples of a combined batch is that of the first loader that has a batch at this step.

    Args:
        iterables: a dict, list or tuple of loaders, which may be nested.
        mode: ``"min_size"`` ends with the shortest loader; ``"max_size_cycle"`` ends with the longest and restarts the
            others; ``"max_size"`` ends with the longest and yields None for exhausted loaders; ``"sequential"``
            iterates the loaders one after the other.

    Raises:
        ConfigurationError: the mode is unknown, or there is no loader.
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
                f"CombinedLoader({iterables!r}) contains no loader",
                "there is nothing to iterate",
                "pass at least one loader",
            )

    def __len__(self) -> int:
        length = combined_length([len_or_none(loader) for loader in self.flattened], self.mode)
        if length is None:
            raise TypeError("one of the combined loaders has no length")
        return length

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx), as in Lightning; dataloader_idx is 0 except in ``"sequential"``."""
        streams = [_Stream(_loader_opener(loader)) for loader in self.flattened]
        if self.mode == "sequential":
            for index, stream in enumerate(streams):
                for batch_idx, batch in enumerate(stream.open(0, 0)):
                    yield batch, batch_idx, index
            return
        positions = [_StreamPosition() for _ in streams]
        for batch_idx, row in enumerate(_iterate_rows(streams, self.mode, 0, positions)):
            yield _unflatten(self.iterables, iter(row)), batch_idx, 0


def is_collection(value: Any) -> bool:
    """Return whether ``value`` is a collection of loaders rather than an iterable of batches."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and any(is_loader(entry) for entry in value)


def is_loader(value: Any) -> bool:
    """Return whether ``value`` is a loader rather than a batch, which may be iterable as well."""
    if isinstance(value, DataLoader | CombinedLoader):
        return True
    if isinstance(value, Tensor | Mapping | list | tuple | str | bytes) or not hasattr(value, "__iter__"):
        return False
    # An iterable that can be moved to a device or converted to an array is a batch of a custom class.
    return not hasattr(value, "to") and not hasattr(value, "__array__")


class CombinedSource:
    """`BatchSource` over the sources of a `CombinedLoader`.

    Args:
        loader: the combined loader.
        sources: the sources of its ``flattened`` loaders.
    """

    def __init__(self, loader: CombinedLoader, sources: Sequence[BatchSource]) -> None:
        self._loader = loader
        self._sources = sources
        self.shards_known = all(source.shards_known for source in sources)
        self._measure()
        self.length_is_exact = all(source.length_is_exact for source in sources)
        self.in_process = any(source.in_process for source in sources)
        self.stateful = any(source.stateful for source in sources)
        self.stride = sources[0].stride if loader.mode != "sequential" else None
        self.fresh_memory = all(source.fresh_memory for source in sources)
        subsets = [source.subset for source in sources]
        self.subset = None if all(subset is None for subset in subsets) else subsets
        self._positions: list[_StreamPosition] = []  # where each source is; updated as batches are read
        self._resumed_at: list[_StreamPosition] | None = None

    @property
    def needs_order_check(self) -> bool:
        return any(source.needs_order_check for source in self._sources)

    def order_fingerprints(self) -> list[OrderFingerprint]:
        return [
            fingerprint
            for source in self._sources
            if source.needs_order_check
            for fingerprint in source.order_fingerprints()
        ]

    def shards(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> None:
        """Return None, because the loader that a shard comes from is known only when its batch is read."""
        return

    def requested_indices(self) -> None:
        """Return None, because there is no common order of the indices of several loaders."""
        return

    def epoch(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[tuple[Any, BatchShare]]:
        if origin.samples:
            raise ConfigurationError(
                f"{len(self._sources)} combined loaders cannot resume within an epoch with another world size or batch "
                "size.",
                "each of these loaders is at a different position in its own order.",
                "resume on the same number of ranks with the same batch sizes, or from a checkpoint at an epoch's end.",
            )
        positions = self._resumed_at if start else None  # an epoch that was over when it was saved is not resumed
        self._resumed_at = None
        if self._loader.mode == "sequential":
            return self._iterate_sequentially(epoch, start, positions)
        return self._iterate_together(epoch, start, positions)

    def count(self, epoch: int) -> int | None:
        return self.length if self.length_is_exact else None

    def state_dict(self) -> dict[str, Any]:
        positions = None
        if self.stateful:  # a stateful source goes on from its own state, which the number of rows does not determine
            positions = [[position.pass_number, position.offset, position.ended] for position in self._positions]
        return {"sources": [source.state_dict() for source in self._sources], "positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        positions = state["positions"]
        self._resumed_at = None if positions is None else [_StreamPosition(*position) for position in positions]
        for index, (source, saved) in enumerate(zip(self._sources, state["sources"], strict=True)):
            if self._resumed_at is not None and self._resumed_at[index].ended and self._loader.mode != _CYCLE:
                continue  # The next epoch reads this source from its beginning.
            source.load_state_dict(saved)

    def refresh(self) -> bool:
        changed = [source.refresh() for source in self._sources]
        self._measure()
        return any(changed)

    def _measure(self) -> None:
        known_counts = [source.samples for source in self._sources if source.samples is not None]
        self.samples = sum(known_counts) if len(known_counts) == len(self._sources) else None
        self.length = combined_length([source.length for source in self._sources], self._loader.mode)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _iterate_sequentially(
        self, epoch: int, start: int, positions: list[_StreamPosition] | None
    ) -> Iterator[tuple[Any, BatchShare]]:
        skipped = 0
        if positions is None:
            positions, skipped = self._find_sequential_positions(epoch, start)
        self._positions = positions
        remaining = [pair for pair in zip(self._sources, positions, strict=True) if not pair[1].ended]
        if not remaining:
            return iter(())
        # Start the epoch here rather than at the first read, as other sources do.
        first, position = remaining.pop(0)
        batches = _follow(first.epoch(epoch, position.offset), position)
        return islice(chain(batches, self._remaining(remaining, epoch)), skipped, None)

    def _find_sequential_positions(self, epoch: int, start: int) -> tuple[list[_StreamPosition], int]:
        """Return the sources' positions at batch ``start``, and how many batches to read and drop from there on."""
        positions = [_StreamPosition() for _ in self._sources]
        for source, position in zip(self._sources[:-1], positions, strict=False):
            length = source.count(epoch) if start else None
            if length is None:  # The source may end before batch `start`.
                return positions, start
            if start < length:
                position.offset = start
                return positions, 0
            start -= length
            position.ended = True
        positions[-1].offset = start
        return positions, 0

    @staticmethod
    def _remaining(
        sources: Sequence[tuple[BatchSource, _StreamPosition]], epoch: int
    ) -> Iterator[tuple[Any, BatchShare]]:
        for source, position in sources:
            yield from _follow(source.epoch(epoch, position.offset), position)

    def _iterate_together(
        self, epoch: int, start: int, positions: list[_StreamPosition] | None
    ) -> Iterator[tuple[Any, BatchShare]]:
        streams = []
        for source in self._sources:
            passes = 1
            if self._loader.mode == _CYCLE:
                length_known = self.length_is_exact and source.length
                passes = -(-self.length // source.length) if length_known else _MAX_PASSES  # type: ignore[operator]
            streams.append(_source_stream(source, epoch * passes))
        skipped = 0
        if positions is None:
            positions, skipped = _find_positions(streams, start, self._loader.mode)
        self._positions = positions
        rows = _iterate_rows(streams, self._loader.mode, start - skipped, positions)
        return self._assemble(islice(rows, skipped, None))

    def _assemble(self, rows: Iterator[list[Any]]) -> Iterator[tuple[Any, BatchShare]]:
        for row in rows:
            shard = next(pair[1] for pair in row if pair is not None)
            batches = iter([None if pair is None else pair[0] for pair in row])
            yield _unflatten(self._loader.iterables, batches), shard


class _Stream(NamedTuple):
    """One of the combined loaders.

    Attributes:
        open: starts a pass over the loader; takes the number of the pass and the number of the batch to start at.
        length: the exact number of batches in every pass; None if the number is unknown.
        length_of: takes the number of a pass and returns its exact number of batches; None if the number is unknown.
    """

    open: Callable[[int, int], Iterator[Any]]
    length: int | None = None
    length_of: Callable[[int], int | None] = lambda pass_number: None


def combined_length(lengths: Sequence[int | None], mode: str) -> int | None:
    """Return how many batches loaders with the given lengths yield together; None if the number is unknown."""
    known_lengths = [length for length in lengths if length is not None]
    if len(known_lengths) < len(lengths):
        return None
    if mode == "sequential":
        return sum(known_lengths)
    return min(known_lengths) if mode == "min_size" else max(known_lengths)


@dataclass(slots=True)
class _StreamPosition:
    """The position of a loader at a step. It is updated as the loader's batches are read.

    Attributes:
        pass_number: number of the current pass over the loader.
        offset: number of the next batch in the pass.
        ended: whether any pass has ended.
    """

    pass_number: int = 0
    offset: int = 0
    ended: bool = False


def _find_positions(streams: Sequence[_Stream], start: int, mode: str) -> tuple[list[_StreamPosition], int]:
    """Return the streams' positions at step ``start``, and how many rows to read and drop from there on."""
    positions = [_find_position(stream, start, mode == _CYCLE) for stream in streams]
    known = [position for position in positions if position is not None]
    if len(known) == len(streams):
        return known, 0
    # The position of some stream at ``start`` is unknown, so the rows before it are read.
    return [_StreamPosition() for _ in streams], start


def _iterate_rows(
    streams: Sequence[_Stream], mode: str, start: int, positions: list[_StreamPosition]
) -> Iterator[list[Any]]:
    """Start every stream at its position, and return the rows from there on. A row holds one batch of each stream.

    Args:
        streams: the loaders.
        mode: the mode of the `CombinedLoader`.
        start: the number of the step that ``positions`` belong to.
        positions: the position of each stream, which is updated as rows are read.
    """
    steps = combined_length([stream.length for stream in streams], mode)
    if _is_finished(positions, mode):
        return iter(())
    iterators = [
        iter(()) if position.ended and mode != _CYCLE else stream.open(position.pass_number, position.offset)
        for stream, position in zip(streams, positions, strict=True)
    ]
    rows = _step_rows(streams, mode, positions, iterators)
    # If all lengths are exact, no stream is read beyond its end.
    return rows if steps is None else islice(rows, max(0, steps - start))


def _find_position(stream: _Stream, start: int, cycle: bool) -> _StreamPosition | None:
    """Return a stream's position at step ``start``; None if it is unknown."""
    pass_number, offset = 0, start
    while offset:
        length = stream.length_of(pass_number)
        if not length:
            return None
        if offset < length:
            break
        if not cycle:
            return _StreamPosition(ended=True)
        pass_number, offset = pass_number + 1, offset - length
    return _StreamPosition(pass_number, offset, ended=pass_number > 0)


def _step_rows(
    streams: Sequence[_Stream], mode: str, positions: Sequence[_StreamPosition], iterators: list[Iterator[Any]]
) -> Iterator[list[Any]]:
    while True:
        row: list[Any] = []
        exhausted_indices = []
        for index, batches in enumerate(iterators):
            row.append(next(batches, _EXHAUSTED))
            positions[index].offset += 1
            if row[index] is _EXHAUSTED:
                exhausted_indices.append(index)
                positions[index].ended = True
                if mode == "min_size":
                    return
        if _is_finished(positions, mode):  # The end is checked before any stream is restarted.
            return
        for index in exhausted_indices:
            iterators[index], row[index] = iter(()), None
            if mode == _CYCLE:
                position = positions[index]
                position.pass_number, position.offset = position.pass_number + 1, 1
                iterators[index] = streams[index].open(position.pass_number, 0)
                row[index] = next(iterators[index], None)
        yield row


def _follow(batches: Iterator[Any], position: _StreamPosition) -> Iterator[Any]:
    """Yield ``batches``, and update ``position`` as they are read."""
    for batch in batches:
        position.offset += 1
        yield batch
    position.ended = True


def _is_finished(positions: Sequence[_StreamPosition], mode: str) -> bool:
    ended = map(attrgetter("ended"), positions)
    return any(ended) if mode == "min_size" else all(ended)


def _loader_opener(loader: Any) -> Callable[[int, int], Iterator[Any]]:
    return lambda _, offset: islice(iter(loader), offset, None)


def _source_stream(source: BatchSource, first: int) -> _Stream:
    # Each pass is an epoch of the source, so that the order differs between the passes of a restarted loader.
    return _Stream(
        lambda pass_number, offset: source.epoch(first + pass_number, offset),
        source.length if source.length_is_exact else None,
        lambda pass_number: source.count(first + pass_number),
    )


def leaves(tree: Any) -> list[Any]:
    """Return the loaders of a nested collection, from left to right."""
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for value in values for leaf in (leaves(value) if is_collection(value) else [value])]


def _unflatten(tree: Any, values: Iterator[Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _unflatten(value, values) if is_collection(value) else next(values) for key, value in tree.items()}
    filled = [_unflatten(value, values) if is_collection(value) else next(values) for value in tree]
    return filled if isinstance(tree, list) else tuple(filled)
