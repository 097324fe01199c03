"""What stands in a `DataLoader` in place of its sampler, and tells the shares of what it asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any, NoReturn, TypeVar

import torch

from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain.data._custom_samplers import Group, SamplerDraws
from drivetrain.data._sharding import START, Deal, Origin, Share
from drivetrain.data._worker_seeding import KeyedIndex, KeyedIndices, MicroBatch
from drivetrain.data.order import Order
from drivetrain.errors import ConfigurationError

Entry = TypeVar("Entry")

_HOST = torch.device("cpu")

# Global micro-batches that a user's sampler is read ahead: swapping all generators twice costs far more than a draw.
_READ_AHEAD = 32


class Feed(ABC):
    """A batch sampler (or sampler) of this rank's part, restarted at any micro-batch of any epoch.

    Args:
        length: micro-batches that an epoch is said to have; None where the sampler does not say.
        items: the data set holds whole batches, so that an index stands by itself rather than in a list.
        keyed: requests go to workers, and carry which micro-batch they are for.
    """

    certain = False
    """Whether an epoch has ``length`` micro-batches, whatever a sampler says."""

    def __init__(self, length: int | None, items: bool, keyed: bool) -> None:
        self.length = length
        self._items = items
        self._keyed = keyed
        self._epoch = 0
        self._start = 0
        self._origin = START
        self.told: deque[list[Any]] | None = None
        """Where the indices of each request are told as it is made; None where nobody wants to know."""

    @abstractmethod
    def begin(self, epoch: int, start: int, origin: Origin = START) -> Iterator[Share]:
        """Say where the next iteration starts, and return the shares of what it will ask for; see `BatchSource`."""

    def shares(self, start: int, origin: Origin = START) -> Iterator[Share] | None:
        """Return what `begin` returns, without beginning anything; None where it shows only as the sampler is read."""
        return None

    def indices(self, epoch: int) -> Iterator[list[Any]] | None:
        """See `BatchSource`."""
        return None

    @abstractmethod
    def count(self, epoch: int) -> int | None:
        """See `BatchSource`."""

    @abstractmethod
    def _blocks(self) -> Iterator[list[Any]]:
        """Yield the requests of the epoch begun last, a block of micro-batches at a time."""

    def __iter__(self) -> Iterator[Any]:
        # `DataLoader` may ask for two iterators and use the second: nothing is drawn before the first `next`.
        return chain.from_iterable(self._blocks())

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the sampler has no length")
        return self.length

    def state_dict(self) -> dict[str, Any]:
        """See `BatchSource`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `BatchSource`."""

    def _requests(self, block: list[list[Any]], epoch: int, first: int) -> list[Any]:
        if self.told is not None:
            self.told.extend(block)
        if not self._keyed:
            return [indices[0] for indices in block] if self._items else block
        keys = map(MicroBatch._make, zip([epoch] * len(block), count(first), strict=False))
        if self._items:
            return [KeyedIndex(indices[0], key) for indices, key in zip(block, keys, strict=True)]
        requests = []
        for indices, key in zip(block, keys, strict=True):
            request = KeyedIndices(indices)
            request.key = key
            requests.append(request)
        return requests


class DealtFeed(Feed):
    """Asks for the samples of an order of ours: any micro-batch can be the first, at no cost.

    Args:
        deal: how the epoch is dealt.
        order_of: the order of an epoch.
        items: see `Feed`.
        keyed: see `Feed`.
    """

    certain = True

    def __init__(self, deal: Deal, order_of: Callable[[int], Order], items: bool, keyed: bool) -> None:
        super().__init__(deal.length, items, keyed)
        self._deal = deal
        self._order_of = order_of

    def begin(self, epoch: int, start: int, origin: Origin = START) -> Iterator[Share]:
        self._epoch, self._start, self._origin = epoch, start, origin
        return chain(self.shares(start, origin), _surplus())

    def shares(self, start: int, origin: Origin = START) -> Iterator[Share]:
        return chain.from_iterable(self._deal.rest(origin.samples).shares(start - origin.number))

    def indices(self, epoch: int) -> Iterator[list[Any]]:
        return chain.from_iterable(self._deal.indices(self._order_of(epoch)))

    def count(self, epoch: int) -> int | None:
        return self.length

    def _blocks(self) -> Iterator[list[Any]]:
        return self._blocks_from(self._epoch, self._start, self._origin)

    def _blocks_from(self, epoch: int, first: int, origin: Origin) -> Iterator[list[Any]]:
        for block in self._deal.rest(origin.samples).indices(self._order_of(epoch), first - origin.number):
            yield self._requests(block, epoch, first)
            first += len(block)


class StreamFeed(Feed):
    """Asks for what a user's sampler yields, in its order.

    Every rank goes through the whole of it and keeps its own part, so that all know each other's shares. A start
    within the epoch goes through the indices before it, not through the samples.

    Args:
        groups_of: start the sampler anew, leave out its first so many samples, and return global micro-batches.
        draws_of: the generators that it draws from in an epoch; None leaves it the process's own.
        rank: this rank.
        alone: other ranks' samplers are not known here, so that totals are not either.
        length: see `Feed`.
        items: see `Feed`.
        keyed: see `Feed`.
    """

    def __init__(
        self,
        groups_of: Callable[[int], Iterator[Group]],
        draws_of: Callable[[int], SamplerDraws] | None,
        rank: int,
        alone: bool,
        length: int | None,
        items: bool,
        keyed: bool,
    ) -> None:
        super().__init__(length, items, keyed)
        self._groups_of = groups_of
        self._draws_of = draws_of
        self._rank = rank
        self._alone = alone
        self._began: dict[str, Any] | None = None  # where the process's generators stood before the sampler drew
        self._shares: deque[Share] = deque()
        self.first: list[Group] | None = None
        """The first groups that were drawn."""

    def begin(self, epoch: int, start: int, origin: Origin = START) -> Iterator[Share]:
        self._epoch, self._start, self._origin, self._shares = epoch, start, origin, deque()
        return chain(drained(self._shares), _surplus())

    def count(self, epoch: int) -> int | None:
        if self._draws_of is None:
            return None  # it would draw from the process's generators
        return sum(len(groups) for groups in self._read(epoch, 0))

    def _blocks(self) -> Iterator[list[Any]]:
        return self._blocks_from(self._epoch, self._start, self._origin, self._shares)

    def _blocks_from(self, epoch: int, start: int, origin: Origin, shares: deque[Share]) -> Iterator[list[Any]]:
        position, number = origin
        for groups in self._read(epoch, origin.samples):
            if self.first is None:
                self.first = groups
            first = number
            number += len(groups)
            requests = []
            for group in groups:
                if first < start:
                    first += 1
                    position += len(group.indices)
                    continue
                indices, bounds, _ = group
                low, high = bounds[self._rank], bounds[self._rank + 1]
                total = None if self._alone else len(indices)
                if low == high:
                    requests.append(indices[:1])
                    shares.append(Share(0, total, True, position))
                else:
                    requests.append(indices[low:high])
                    shares.append(Share(high - low, total, False, position + low))
                position += len(indices)
            if requests:
                yield self._requests(requests, epoch, first)

    def _read(self, epoch: int, done: int) -> Iterator[list[Group]]:
        if self._draws_of is None:
            # The sampler draws from the process's generators, when a loop written by hand would.
            for group in self._from_the_process(done):
                yield [group]
            return
        draws = self._draws_of(epoch)
        groups: Iterator[Group] | None = None
        while True:
            with draws:
                if groups is None:
                    groups = self._groups_of(done)
                block = list(islice(groups, _READ_AHEAD))
            if not block:
                return
            yield block

    def _from_the_process(self, done: int) -> Iterator[Group]:
        """Start the sampler; for a start within the epoch from where the generators stood as the epoch began."""
        groups = self._groups_of(done)
        if self._start == 0 or self._began is None:
            self._began = generator_states(_HOST)
            return groups
        now = generator_states(_HOST)
        restore_generators(self._began, _HOST)
        first = list(islice(groups, self._start - self._origin.number + 1))
        restore_generators(now, _HOST)
        return chain(first, groups)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._began = state["began"]


class _Surplus(ConfigurationError):
    """The loader gave more batches than its sampler asked for."""


def complete(shares: Iterator[Share]) -> Iterator[NoReturn]:
    """Yield nothing, and refuse a loader that ended while there were shares left.

    Raises:
        ConfigurationError: it did.
    """
    yield from ()
    try:
        missing = next(shares)
    except _Surplus:
        return
    raise ConfigurationError(
        f"the loader ended early: the batch for sample {missing.start} of the epoch's order never came",
        "its sampler asked for more batches than the loader gave, and the other ranks count on all of them",
        "let the DataLoader subclass yield one batch for each batch of indices, or pass any iterable of batches",
    )


def drained(queue: deque[Entry]) -> Iterator[Entry]:
    """Yield and forget what is in a queue, also what comes into it meanwhile."""
    while queue:
        yield queue.popleft()


def _surplus() -> Iterator[Share]:
    yield from ()
    raise _Surplus(
        "the loader gave more batches than its sampler asked for",
        "how many samples the batches hold is known from the sampler, and these are not",
        "let the DataLoader subclass yield one batch for each batch of indices, or pass any iterable of batches",
    )


def sized(sampler: Iterable[Any]) -> int | None:
    """Return ``len(sampler)``, or None where it has none."""
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
