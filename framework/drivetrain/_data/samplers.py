"""Samplers that replace a `DataLoader`'s sampler: they request this rank's samples and report each request's share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from drivetrain._data.sample_order import KeyedPermutation, in_sequence
from drivetrain._data.sharding import EPOCH_START, BatchShare, EpochOffset, EpochSharding
from drivetrain._data.worker_seeding import KeyedIndex, KeyedIndices
from drivetrain.errors import ConfigurationError

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class LoaderSharding:
    """How the sampler of a map-style `DataLoader` is sharded. The attributes are the arguments of `prepare_loader`."""

    training: bool
    predicting: bool
    rank: int
    world_size: int
    seed: int
    replace_sampler: bool


class RankSampler(ABC):
    """Batch sampler (or sampler) of this rank's part, which can start at any micro-batch of any epoch.

    Args:
        prebatched: whether the data set holds whole batches, so that a request is a single index rather than a list.
        keyed: whether each request carries the key of its micro-batch, which worker processes need.
    """

    length: int | None
    """The number of micro-batches that the sampler declares for an epoch; None if it declares no length."""
    length_is_exact = False
    """Whether every epoch has exactly ``length`` micro-batches."""

    def __init__(self, prebatched: bool, keyed: bool) -> None:
        self._prebatched = prebatched
        self._keyed = keyed
        self._begun: tuple[Any, ...] = (0, 0, EPOCH_START)
        self.requested: deque[list[Any]] | None = None
        """A queue that receives the indices of each request when it is made; None if indices are not recorded."""
        self.state: dict[str, Any] = {}
        """What a checkpoint holds of the sampler; see `BatchSource.state_dict`. It is replaced, never changed."""
        self.refresh()

    @abstractmethod
    def refresh(self) -> None:
        """Use the present size of the data from the next epoch on."""

    @abstractmethod
    def begin(self, epoch: int, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        """Set where the next iteration starts, and return the shares of its requests; see `BatchSource.epoch`."""

    def shares(self, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare] | None:
        """Return the shares that `begin` would return; None if they are known only after the sampler is read."""
        return None

    @abstractmethod
    def count(self, epoch: int) -> int | None:
        """See `BatchSource`."""

    @abstractmethod
    def _blocks(self, *begun: Any) -> Iterator[list[Any]]:
        """Yield the requests of the epoch that `begin` set, in blocks of several micro-batches."""

    def __iter__(self) -> Iterator[Any]:
        # `DataLoader` may create two iterators and use the second, so nothing is drawn before the first `next`.
        return chain.from_iterable(self._blocks(*self._begun))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the sampler has no length")
        return self.length

    def _requests(self, block: list[list[Any]], epoch: int, first: int) -> list[Any]:
        if self.requested is not None:
            self.requested.extend(block)
        if not self._keyed:
            return [indices[0] for indices in block] if self._prebatched else block
        if self._prebatched:
            return [KeyedIndex(indices[0], (epoch, number)) for number, indices in enumerate(block, first)]
        requests = []
        for number, indices in enumerate(block, first):
            request = KeyedIndices(indices)
            request.key = epoch, number
            requests.append(request)
        return requests


class ShardedSampler(RankSampler):
    """`RankSampler` in place of a standard torch sampler. It starts at any micro-batch without iterating to it.

    Args:
        sampler: the loader's batch sampler over a standard sampler, or its standard sampler if ``prebatched``.
        sharding: how the sampler is sharded.
        prebatched: see `RankSampler`.
        keyed: see `RankSampler`.
    """

    length_is_exact = True

    def __init__(self, sampler: Any, sharding: LoaderSharding, prebatched: bool, keyed: bool) -> None:
        self._settings = sharding
        self._sampler = inner = sampler if prebatched else sampler.sampler
        self._batch_size = 1 if prebatched else sampler.batch_size
        self._drop_last = not prebatched and sampler.drop_last and not sharding.predicting
        self._shuffles = not sharding.predicting and (
            inner.shuffle if type(inner) is DistributedSampler else type(inner) is RandomSampler
        )
        super().__init__(prebatched, keyed)

    @staticmethod
    def can_replace(sampler: Any, prebatched: bool) -> bool:
        """Return whether ``sampler`` is one of torch's own, or batches of one."""
        if not prebatched:
            if type(sampler) is not BatchSampler:
                return False
            sampler = sampler.sampler
        if type(sampler) is RandomSampler:
            return not sampler.replacement and len(sampler) == len(sampler.data_source)
        return type(sampler) in (SequentialSampler, DistributedSampler)

    def refresh(self) -> None:
        sampler, settings = self._sampler, self._settings
        if type(sampler) is RandomSampler and len(sampler) != len(sampler.data_source):
            raise ConfigurationError(
                f"RandomSampler(num_samples={len(sampler)}) of a data set that now has {len(sampler.data_source)} "
                "samples",
                "the number of samples was fixed when the sampler was built, so the sampler does not follow the "
                "data set",
                "leave num_samples out, or use shuffle=True of the DataLoader",
            )
        source: Any = sampler.dataset if type(sampler) is DistributedSampler else sampler
        self._sharding = EpochSharding(
            len(source), self._batch_size, settings.rank, settings.world_size, self._drop_last, settings.training
        )
        self.length = self._sharding.length

    def begin(self, epoch: int, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        self._begun = epoch, start, origin
        return self.shares(start, origin)

    def shares(self, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        return chain.from_iterable(self._sharding.remaining(origin.samples).shares(start - origin.number))

    def count(self, epoch: int) -> int | None:
        return self.length

    def _blocks(self, epoch: int, first: int, origin: EpochOffset) -> Iterator[list[Any]]:
        samples = self._sharding.samples
        order = KeyedPermutation(samples, self._settings.seed, epoch) if self._shuffles else in_sequence
        for block in self._sharding.remaining(origin.samples).indices(order, first - origin.number):
            yield self._requests(block, epoch, first)
            first += len(block)


def drain(queue: deque[Entry]) -> Iterator[Entry]:
    """Pop and yield the entries of a queue until it is empty, including those that are added in the meantime."""
    while queue:
        yield queue.popleft()


def len_or_none(sampler: Iterable[Any]) -> int | None:
    """Return ``len(sampler)``, or None if it has no length."""
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
