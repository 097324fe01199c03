"""Preparing a user's loader: from whatever yields batches to a `BatchSource` of this rank's part."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from drivetrain._runtime.seed import derive_seed
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._custom_samplers import Group, SamplerRng, groups_of_batches, groups_of_indices, without_joiners
from drivetrain.data._iterable_source import IterableSource, count_samples, empty, set_epoch
from drivetrain.data._loader_copy import LoaderClone, allocates_each_batch
from drivetrain.data._samplers import Feed, ShardedCustomSampler, ShardedSampler, complete, drained, len_or_none
from drivetrain.data._sharding import EPOCH_START, BatchShard, Deal, ShardingOrigin
from drivetrain.data._worker_seeding import SeededDataset, WorkerStart
from drivetrain.data.combined import CombinedLoader, CombinedSource, is_collection
from drivetrain.data.order import KeyedPermutation, Order, SequentialOrder
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.data._order_fingerprint import OrderFingerprint

logger = logging.getLogger("drivetrain")


def prepare_loader(
    loader: Any,
    *,
    training: bool,
    predicting: bool = False,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    replace_sampler: bool = True,
) -> BatchSource:
    """Deal what ``loader`` yields to the ranks.

    Args:
        loader: a `DataLoader`, any iterable of batches, a `CombinedLoader`, or a dict or list of loaders (for training
            ``"max_size_cycle"``, else ``"sequential"``). It is left as it is.
        training: deal for training (a rank without a sample joins) rather than evaluation.
        predicting: keep to the order of the data set, and drop nothing.
        rank: this rank among those that get different data.
        world_size: how many those are.
        seed: the seed of the order, the same on every rank.
        replace_sampler: False leaves the loader's sampler alone: each rank reads what its own loader gives.

    Raises:
        ConfigurationError: there is no batch in it, it is not an iterable of batches, or its workers could hand none
            over.
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank={rank} is none of the {world_size} ranks that share the data",
            f"ranks go from 0 to {world_size - 1}",
            "check the strategy's `data_rank` and `data_world_size`",
        )
    if is_collection(loader):
        loader = CombinedLoader(loader, "max_size_cycle" if training else "sequential")
    if isinstance(loader, CombinedLoader):
        sources = [
            prepare_loader(
                part,
                training=training,
                predicting=predicting,
                rank=rank,
                world_size=world_size,
                # Two loaders of one length are not to be shuffled alike.
                seed=derive_seed(seed, index) if index else seed,
                replace_sampler=replace_sampler,
            )
            for index, part in enumerate(loader.flattened)
        ]
        return CombinedSource(loader, sources)
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        from drivetrain.data._socket_paths import check_temporary_folder  # for whoever has workers

        check_temporary_folder(loader.num_workers)
    plan = _Plan(training, predicting, rank, world_size, seed, replace_sampler)
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        return plan.of_map_style(loader)
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(
            f"{type(loader).__name__} is no loader",
            "batches come from a DataLoader or another iterable of batches",
            "pass a torch.utils.data.DataLoader, a CombinedLoader, or an object with `__iter__`",
        )
    return IterableSource(loader, rank, world_size, seed)


class MapSource:
    """Batches of a map-style data set, dealt by index.

    Args:
        clone: the loader with ``feed`` in place of its sampler.
        feed: says which samples to read.
        static: see `BatchSource`.
        samples: see `BatchSource`.
        items: the data set holds whole batches, whose sizes show only when they are there.
        own_way: the loader may give another number of batches than it is asked for.
        alone: how much other ranks hold is not known.
        begins: called with the epoch as it begins.
        in_process: see `BatchSource`.
        stride: see `BatchSource`.
        subset: see `BatchSource`.
        sampler: the user's own, whose order every rank goes through: what they draw is compared; None where the order
            is ours, or each rank's own.
    """

    def __init__(
        self,
        clone: LoaderClone,
        feed: Feed,
        shards_known: bool,
        samples: int | None,
        items: bool,
        own_way: bool,
        alone: bool,
        begins: Callable[[int], None],
        in_process: bool,
        stride: int | None,
        subset: list[Any] | None,
        sampler: str | None,
    ) -> None:
        self._clone = clone
        self._feed = feed
        self._items = items
        self._own_way = own_way
        self._alone = alone
        self._begins = begins
        self.shards_known = shards_known
        self.samples = samples
        self.in_process = in_process
        self.stateful = False
        self.stride = stride
        self.subset = subset
        self._sampler = sampler
        self.needs_order_check = sampler is not None
        self.fresh_memory = allocates_each_batch(clone.loader)

    @property
    def length(self) -> int | None:
        return self._feed.length

    def shards(self, epoch: int, start: int = 0, origin: ShardingOrigin = EPOCH_START) -> Iterator[BatchShard] | None:
        # What a loader gives that iterates in a way of its own shows only when it is there.
        return None if self._items or self._own_way else self._feed.shards(start, origin)

    def indices(self, epoch: int) -> Iterator[list[Any]] | None:
        return None if self._items or self._own_way else self._feed.indices(epoch)

    def requested_indices(self) -> Iterator[list[Any]] | None:
        # An index is a whole batch there, or the batches may be others than were asked for.
        if self._items or self._own_way:
            return None
        told = self._feed.told = deque()
        return drained(told)

    @property
    def length_is_exact(self) -> bool:
        return self._feed.length_is_exact and not self._own_way

    def count(self, epoch: int) -> int | None:
        if self._own_way:
            return None
        self._begins(epoch)
        return self._feed.count(epoch)

    def epoch(
        self, epoch: int, start: int = 0, origin: ShardingOrigin = EPOCH_START
    ) -> Iterator[tuple[Any, BatchShard]]:
        if origin.samples and self._alone:
            raise ConfigurationError(
                "a loader whose sampler is each rank's own cannot go on within an epoch at another world size",
                "nobody knows what the other ranks' parts would become",
                "resume on as many ranks, from a checkpoint at an epoch's end, or let Fit deal the data",
            )
        self._begins(epoch)
        shards = self._feed.begin(epoch, start, origin)
        if self._own_way:
            return self._as_they_come(shards, start)
        # Nothing of this is a Python call for each batch, but where batches have to be measured.
        pairs = zip(self._clone.iterate(), shards, strict=False)
        return chain(self._measured(pairs) if self._items else pairs, complete(shards))

    def order_fingerprints(self) -> list[OrderFingerprint]:
        from drivetrain.data._order_fingerprint import OrderFingerprint, digest_of_indices

        self.needs_order_check = False
        drawn = getattr(self._feed, "first", None)
        digest = None if drawn is None else digest_of_indices([group.indices for group in drawn])
        return [OrderFingerprint(self._sampler or "", digest, common=True)]

    def state_dict(self) -> dict[str, Any]:
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feed.load_state_dict(state)

    def close(self) -> None:
        self._clone.close()

    def _as_they_come(self, shards: Iterator[BatchShard], start: int) -> Iterator[tuple[Any, BatchShard]]:
        from drivetrain.data._custom_loaders import pair_with_shards

        name = type(self._clone.loader).__name__
        if start:
            logger.warning(
                "%s says itself how it is iterated: that it goes on at batch %d of the epoch holds where it has given "
                "one batch for each that its sampler asked for.",
                name,
                start,
            )
        pair = None
        for pair in pair_with_shards(self._clone.iterate(), shards, not self.shards_known):
            yield pair
        if pair is None and start == 0:
            raise empty(f"{name} gave no batch")

    def _measured(self, pairs: Iterator[tuple[Any, BatchShard]]) -> Iterator[tuple[Any, BatchShard]]:
        for batch, shard in pairs:
            samples = 0 if shard.joins else count_samples(batch)
            yield batch, shard._replace(samples=samples, total=None if self._alone else samples)


class _Plan:
    """What `prepare_loader` was told, applied to a map-style `DataLoader`."""

    def __init__(
        self, training: bool, predicting: bool, rank: int, world_size: int, seed: int, replace_sampler: bool
    ) -> None:
        self._training = training
        self._predicting = predicting
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._replace = replace_sampler

    def of_map_style(self, loader: DataLoader[Any]) -> MapSource:
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler: Any = getattr(loader, slot)
        # Without automatic batching an index is a whole batch, unless the sampler itself makes lists of them.
        items = slot == "sampler" and not isinstance(sampler, BatchSampler)
        keyed = loader.num_workers > 0
        alone = self._world_size > 1 and (not self._replace or _is_rank_s_own(sampler, self._world_size))
        feed = None if alone or not self._replace else self._dealt(sampler, items, keyed)
        seen: tuple[Any, ...] = ()
        if feed is None:
            feed = self._streamed(sampler, items, keyed, alone)
            seen = _samplers(sampler)
        if feed.length == 0:
            raise empty(_why_empty(loader, self._world_size))
        # In order, or the shares would not be those of the batches they come with.
        attributes: dict[str, Any] = {slot: feed, "in_order": True}
        if keyed:
            attributes["dataset"] = SeededDataset(loader.dataset, self._seed, self._rank)
            attributes["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
        own_way = False
        if type(loader) is not DataLoader and not items:
            from drivetrain.data._custom_loaders import has_custom_iteration  # for whoever has such a loader

            own_way = has_custom_iteration(loader)
        several = self._world_size > 1
        unknown = several and (alone or items)
        return MapSource(
            LoaderClone(loader, **attributes),
            feed,
            not unknown and not (own_way and several),
            None if unknown else len_or_none(loader.dataset),  # type: ignore[arg-type]
            items,
            own_way,
            unknown,
            lambda epoch: set_epoch(epoch, *seen),
            not keyed,
            None if alone else _stride(loader, items, self._world_size),
            _subset(loader.dataset) if several and not alone else None,
            _own_name(seen) if several and not alone and seen else None,
        )

    def _dealt(self, sampler: Any, items: bool, keyed: bool) -> Feed | None:
        """Return a feed of our own order, if the sampler does no more than shuffle or go through the data set."""
        batch_size, drop_last, inner = 1, False, sampler
        if not items:
            if type(sampler) is not BatchSampler:
                return None
            batch_size, drop_last, inner = sampler.batch_size, sampler.drop_last, sampler.sampler
        found = _plain(inner)
        if found is None:
            return None
        samples, shuffles = found
        order_of: Callable[[int], Order] = partial(KeyedPermutation, samples, self._seed)
        if not shuffles or self._predicting:
            order_of = lambda epoch: SequentialOrder(samples)  # noqa: E731
        drop_last = drop_last and not self._predicting
        deal = Deal(samples, batch_size, self._rank, self._world_size, drop_last, self._training)
        return ShardedSampler(deal, order_of, items, keyed)

    def _streamed(self, sampler: Any, items: bool, keyed: bool, alone: bool) -> ShardedCustomSampler:
        """Return a feed that keeps the sampler's order; ``alone``, all of it is this rank's."""
        ours = self._replace and not alone
        world_size, rank = (self._world_size, self._rank) if not alone else (1, 0)
        length = len_or_none(sampler)
        drop_last = bool(getattr(sampler, "drop_last", False)) and not (self._predicting and ours)
        start: Callable[[int], Iterator[Group]]
        if items:
            start = lambda done: groups_of_indices(sampler, 1, world_size, False, done)  # noqa: E731
            length = _divided(length, world_size, False)
        elif type(sampler) is BatchSampler and ours:
            start = lambda done: groups_of_indices(  # noqa: E731
                sampler.sampler, sampler.batch_size, world_size, drop_last, done
            )
            length = _divided(len_or_none(sampler.sampler), world_size * sampler.batch_size, drop_last)
        else:
            start = lambda done: groups_of_batches(sampler, world_size, drop_last, done)  # noqa: E731
            length = _divided(length, world_size, drop_last)

        def groups_of(done: int) -> Iterator[Group]:
            groups = start(done)
            return groups if self._training or not ours else without_joiners(groups, world_size)

        generators = [
            part.generator
            for part in _samplers(sampler)
            if isinstance(getattr(part, "generator", None), torch.Generator)
        ]
        draws_of = (lambda epoch: SamplerRng(self._seed, epoch, generators)) if ours else None
        return ShardedCustomSampler(groups_of, draws_of, rank, alone, length, items, keyed)


def _plain(sampler: Any) -> tuple[int, bool] | None:
    """Return how many samples a plain sampler of torch's goes through and whether it shuffles; None for any other."""
    if type(sampler) is SequentialSampler:
        return len(sampler), False
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return len(sampler), True
    if type(sampler) is DistributedSampler:
        return len(sampler.dataset), sampler.shuffle  # type: ignore[arg-type]
    return None


def _is_rank_s_own(sampler: Any, world_size: int) -> bool:
    """Tell whether a sampler already yields one rank's part only, by the attributes such samplers have."""
    return any(
        type(part) is not DistributedSampler
        and hasattr(part, "rank")
        and getattr(part, "num_replicas", 0) == world_size
        for part in _samplers(sampler)
    )


def _samplers(sampler: Any) -> tuple[Any, ...]:
    """Return a sampler and those within it."""
    parts: list[Any] = []
    while sampler is not None and len(parts) < 8:
        parts.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return tuple(parts)


def _subset(dataset: Any) -> list[Any] | None:
    from drivetrain.data._order_fingerprint import subset_fingerprint  # for runs on several ranks

    return subset_fingerprint(dataset)


def _own_name(samplers: tuple[Any, ...]) -> str:
    """Return the class of the user's own sampler, which may stand around one of torch's or within one."""
    own = [part for part in samplers if not type(part).__module__.startswith("torch.")]
    return type(own[0] if own else samplers[-1]).__name__


def _stride(loader: DataLoader[Any], items: bool, world_size: int) -> int | None:
    if items:
        return world_size
    return None if loader.batch_size is None else world_size * loader.batch_size


def _divided(length: int | None, by: int, drop_last: bool) -> int | None:
    if length is None:
        return None
    return length // by if drop_last else -(-length // by)


def _why_empty(loader: DataLoader[Any], world_size: int) -> str:
    sizes = f"{len_or_none(loader.dataset)} samples, batch_size={loader.batch_size}"  # type: ignore[arg-type]
    return f"{type(loader).__name__} has no batch ({sizes}, drop_last={loader.drop_last}, {world_size} ranks)"
