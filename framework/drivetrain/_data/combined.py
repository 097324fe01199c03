"""Iterates several loaders together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.samplers import len_or_none
from drivetrain._data.sharding import EPOCH_START, BatchShare, EpochOffset
from drivetrain.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain._data.order_fingerprint import OrderFingerprint

_CYCLE = "max_size_cycle"
MODES = ("min_size", _CYCLE, "max_size", "sequential")

_EXHAUSTED: Any = object()
"""Marks an exhausted loader, since None may be a batch."""

# Number of entries of a list in which to look for loaders. A list of batches may be long, and its entries are alike.
_CHECKED_ENTRIES = 8

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
        streams = [_Stream(partial(_open_loader, loader)) for loader in self.flattened]
        if self.mode == "sequential":
            for index, stream in enumerate(streams):
                for batch_idx, batch in enumerate(stream.open(0, 0)):
                    yield batch, batch_idx, index
            return
        for batch_idx, row in enumerate(_rows(streams, self.mode, 0)):
            yield _unflatten(self.iterables, iter(row)), batch_idx, 0


def is_collection(value: Any) -> bool:
    """Return whether ``value`` is a collection of loaders. A list may also be one loader, a list of batches."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list | tuple):
        return False
    entries = value[:_CHECKED_ENTRIES]
    if any(isinstance(entry, Mapping) and not any(map(is_loader, entry.values())) for entry in entries):
        return False
    return any(is_loader(entry) or is_collection(entry) for entry in entries)


def is_loader(value: Any) -> bool:
    """Return whether ``value`` is a loader rather than a batch, which may be iterable as well."""
    if isinstance(value, DataLoader | CombinedLoader):
        return True
    if isinstance(value, Tensor | Mapping | list | tuple | str | bytes) or not hasattr(value, "__iter__"):
        return False
    # An iterable that can be moved to a device or converted to an array is a batch of a custom class.
    return not hasattr(value, "to") and not hasattr(value, "__array__")


class CombinedSource(BatchSource):
    """`BatchSource` over the sources of a `CombinedLoader`.

    Args:
        loader: the combined loader.
        sources: the sources of its ``flattened`` loaders.
    """

    def __init__(self, loader: CombinedLoader, sources: Sequence[BatchSource]) -> None:
        self._loader = loader
        self._sources = sources
        self.shares_known = all(source.shares_known for source in sources)
        self._measure()
        self.length_is_exact = all(source.length_is_exact for source in sources)
        self.in_process = any(source.in_process for source in sources)
        self.stateful = any(source.stateful for source in sources)
        self.stride = sources[0].stride if loader.mode != "sequential" else None
        self.fresh_memory = all(source.fresh_memory for source in sources)
        subsets = [source.subset for source in sources]
        self.subset = None if all(subset is None for subset in subsets) else subsets
        self.needs_order_check = any(source.needs_order_check for source in sources)
        self._streams: list[_Stream] = []  # the streams of the epoch that was started last
        self._resumed_at: Sequence[Sequence[Any]] | None = None  # the position of each stream

    def order_fingerprints(self) -> list[OrderFingerprint]:
        self.needs_order_check = False
        return [
            fingerprint
            for source in self._sources
            if source.needs_order_check
            for fingerprint in source.order_fingerprints()
        ]

    def epoch(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[tuple[Any, BatchShare]]:
        if origin.samples:
            raise ConfigurationError(
                f"{len(self._sources)} combined loaders cannot resume within an epoch with another world size or batch "
                "size.",
                "each of these loaders is at a different position in its own order.",
                "resume on the same number of ranks with the same batch sizes, or from a checkpoint at an epoch's end.",
            )
        resumed_at = self._resumed_at if start else None  # an epoch that was over when it was saved is not resumed
        self._resumed_at = None
        mode, skipped = self._loader.mode, 0
        self._streams = streams = [self._stream_of(source, epoch) for source in self._sources]
        if resumed_at is not None:
            for stream, position in zip(streams, resumed_at, strict=True):
                stream.pass_number, stream.offset, stream.ended = position
        elif mode == "sequential":
            skipped = _seek_in_sequence(streams, start)
        elif not all(stream.seek(start, mode == _CYCLE) for stream in streams):
            # The position of some stream at `start` is unknown, so the rows before it are read.
            streams[:], skipped = [self._stream_of(source, epoch) for source in self._sources], start
        if mode == "sequential":
            pairs = _read_in_sequence(streams)
        else:
            pairs = map(self._assemble, _rows(streams, mode, start - skipped))
        return islice(pairs, skipped, None) if skipped else pairs

    def _stream_of(self, source: BatchSource, epoch: int) -> _Stream:
        passes = 1
        if self._loader.mode == _CYCLE:
            length_known = self.length_is_exact and source.length
            passes = -(-self.length // source.length) if length_known else _MAX_PASSES  # type: ignore[operator]
        # Each pass is an epoch of the source, so that the order differs between the passes of a restarted loader.
        first = epoch * passes
        return _Stream(
            lambda pass_number, offset: source.epoch(first + pass_number, offset),
            source.length if source.length_is_exact else None,
            lambda pass_number: source.count(first + pass_number),
        )

    def _assemble(self, row: list[Any]) -> tuple[Any, BatchShare]:
        share = next(pair[1] for pair in row if pair is not None)
        batches = iter([None if pair is None else pair[0] for pair in row])
        return _unflatten(self._loader.iterables, batches), share

    def state_dict(self) -> dict[str, Any]:
        positions = None
        if self.stateful:  # a stateful source goes on from its own state, which the number of rows does not determine
            streams = self._streams
            positions = self._resumed_at or [[stream.pass_number, stream.offset, stream.ended] for stream in streams]
        return {"sources": [source.state_dict() for source in self._sources], "positions": positions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # A state that was saved before the first epoch has no positions.
        self._resumed_at = positions = state["positions"] or None
        for index, (source, saved) in enumerate(zip(self._sources, state["sources"], strict=True)):
            if positions is not None and positions[index][2] and self._loader.mode != _CYCLE:
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


@dataclass(slots=True)
class _Stream:
    """One of the combined loaders, and its position, which follows as its batches are read.

    Attributes:
        open: starts a pass over the loader; takes the number of the pass and the number of the batch to start at.
        length: the exact number of batches in every pass; None if the number is unknown.
        count: takes the number of a pass and returns its exact number of batches; None if the number is unknown.
        pass_number: number of the current pass over the loader.
        offset: number of the next batch in the pass.
        ended: whether any pass has ended.
    """

    open: Callable[[int, int], Iterator[Any]]
    length: int | None = None
    count: Callable[[int], int | None] = lambda pass_number: None
    pass_number: int = 0
    offset: int = 0
    ended: bool = False

    def seek(self, step: int, restarts: bool) -> bool:
        """Go to the position at ``step`` of an epoch; return False if it is known only after reading.

        Args:
            step: the number of the step.
            restarts: whether the loader is restarted when it has ended.
        """
        while step:
            length = self.count(self.pass_number)
            if not length:
                return False
            # At its very end a loader has not been asked for more yet: its restart, which draws, is the next row's.
            if step <= length:
                break
            self.ended = True
            if not restarts:
                return True
            self.pass_number, step = self.pass_number + 1, step - length
        self.offset = step
        return True


def combined_length(lengths: Sequence[int | None], mode: str) -> int | None:
    """Return how many batches loaders with the given lengths yield together; None if the number is unknown."""
    known_lengths = [length for length in lengths if length is not None]
    if len(known_lengths) < len(lengths):
        return None
    if mode == "sequential":
        return sum(known_lengths)
    return min(known_lengths) if mode == "min_size" else max(known_lengths)


def _seek_in_sequence(streams: Sequence[_Stream], start: int) -> int:
    """Go to batch ``start`` of all streams together; return how many batches to read and drop from there on."""
    for stream in streams[:-1]:
        length = stream.count(0) if start else None
        if length is None:  # The stream may end before batch `start`.
            return start
        if start < length:
            stream.offset = start
            return 0
        start -= length
        stream.ended = True
    streams[-1].offset = start
    return 0


def _read_in_sequence(streams: Sequence[_Stream]) -> Iterator[Any]:
    """Start the first stream that has not ended, and return its batches and those of the streams after it."""
    remaining = [stream for stream in streams if not stream.ended]
    return _follow_in_sequence(remaining, remaining[0].open(0, remaining[0].offset)) if remaining else iter(())


def _follow_in_sequence(streams: Sequence[_Stream], batches: Iterator[Any]) -> Iterator[Any]:
    for number, stream in enumerate(streams):
        for batch in stream.open(0, stream.offset) if number else batches:
            stream.offset += 1
            yield batch
        stream.ended = True


def _rows(streams: Sequence[_Stream], mode: str, step: int) -> Iterator[list[Any]]:
    """Start every stream at its position, and return the rows from there on. A row holds one batch of each stream.

    Args:
        streams: the loaders, at ``step``.
        mode: the mode of the `CombinedLoader`.
        step: the number of the next row.
    """
    steps = combined_length([stream.length for stream in streams], mode)
    if _is_finished(streams, mode):
        return iter(())
    iterators = [
        iter(()) if stream.ended and mode != _CYCLE else stream.open(stream.pass_number, stream.offset)
        for stream in streams
    ]
    rows = _read_rows(streams, mode, iterators)
    # If all lengths are exact, no stream is read beyond its end.
    return rows if steps is None else islice(rows, max(0, steps - step))


def _read_rows(streams: Sequence[_Stream], mode: str, iterators: list[Iterator[Any]]) -> Iterator[list[Any]]:
    while True:
        row: list[Any] = []
        exhausted_indices = []
        for index, (stream, batches) in enumerate(zip(streams, iterators, strict=True)):
            row.append(next(batches, _EXHAUSTED))
            stream.offset += 1
            if row[index] is _EXHAUSTED:
                exhausted_indices.append(index)
                stream.ended = True
                if mode == "min_size":
                    return
        if _is_finished(streams, mode):  # The end is checked before any stream is restarted.
            return
        for index in exhausted_indices:
            iterators[index], row[index] = iter(()), None
            if mode == _CYCLE:
                stream = streams[index]
                stream.pass_number, stream.offset = stream.pass_number + 1, 1
                iterators[index] = stream.open(stream.pass_number, 0)
                row[index] = next(iterators[index], None)
        yield row


def _is_finished(streams: Sequence[_Stream], mode: str) -> bool:
    ended = map(attrgetter("ended"), streams)
    return any(ended) if mode == "min_size" else all(ended)


def _open_loader(loader: Any, pass_number: int, offset: int) -> Iterator[Any]:
    return islice(iter(loader), offset, None)


def leaves(tree: Any) -> list[Any]:
    """Return the loaders of a nested collection, from left to right."""
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [leaf for value in values for leaf in (leaves(value) if is_collection(value) else [value])]


def _unflatten(tree: Any, values: Iterator[Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _unflatten(value, values) if is_collection(value) else next(values) for key, value in tree.items()}
    filled = [_unflatten(value, values) if is_collection(value) else next(values) for value in tree]
    return filled if isinstance(tree, list) else tuple(filled)
