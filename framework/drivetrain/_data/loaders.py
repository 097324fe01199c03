"""Builds the `BatchSource` that yields this rank's part of a user's loader."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.combined import CombinedLoader, CombinedSource, is_collection
from drivetrain._data.custom_samplers import ShardedCustomSampler, nested_samplers
from drivetrain._data.iterable_source import IterableSource, count_samples, no_batches_error, set_epoch
from drivetrain._data.loader_copy import LoaderClone, allocates_each_batch
from drivetrain._data.samplers import LoaderSharding, RankSampler, ShardedSampler, drain, len_or_none
from drivetrain._data.sharding import EPOCH_START, BatchShare, EpochOffset
from drivetrain._data.worker_seeding import SeededDataset, WorkerInit
from drivetrain._runtime.seed import derive_seed
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._data.order_fingerprint import OrderFingerprint

logger = logging.getLogger("drivetrain")

# Loaders of these packages yield one batch for each request of their samplers.
_TRUSTED_PACKAGES = ("torch", "torchdata")


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
    """Return a `BatchSource` that yields this rank's shares of the batches of ``loader``.

    Args:
        loader: a `DataLoader`, any iterable of batches, a `CombinedLoader`, or a dict or list of loaders (combined by
            ``"max_size_cycle"`` for training, else by ``"sequential"``). The loader is not modified.
        training: shard for training instead of evaluation. In training, a rank may have to join a step without samples.
        predicting: keep the order of the data set and drop no sample.
        rank: this process's data rank.
        world_size: the number of data ranks.
        seed: the seed of the order, the same on every rank.
        replace_sampler: shard the loader's sampler. If False, each rank reads all batches that its own loader yields.

    Raises:
        ConfigurationError: the loader has no batch, or the path of the temporary folder is too long for the sockets of
            the loader's workers.
    """
    return _source_of(loader, LoaderSharding(training, predicting, rank, world_size, seed, replace_sampler))


def _source_of(loader: Any, sharding: LoaderSharding) -> BatchSource:
    if isinstance(loader, DataLoader):
        if loader.num_workers > 0:
            from drivetrain._data.worker_processes import check_temporary_folder  # imported only if there are workers

            check_temporary_folder(loader.num_workers)
        if not isinstance(loader.dataset, IterableDataset):
            return MapSource(loader, sharding)
    elif is_collection(loader):
        loader = CombinedLoader(loader, "max_size_cycle" if sharding.training else "sequential")
    if isinstance(loader, CombinedLoader):
        # Two loaders of the same length must not be shuffled in the same order.
        seeds = [sharding.seed, *(derive_seed(sharding.seed, index) for index in range(1, len(loader.flattened)))]
        parts = zip(loader.flattened, seeds, strict=True)
        return CombinedSource(loader, [_source_of(part, replace(sharding, seed=seed)) for part, seed in parts])
    return IterableSource(loader, sharding.rank, sharding.world_size, sharding.seed)


class MapSource(BatchSource):
    """`BatchSource` over a `DataLoader` with a map-style data set, sharded by index.

    Args:
        loader: the user's loader, which is not modified.
        sharding: how the loader's sampler is sharded.
    """

    def __init__(self, loader: DataLoader[Any], sharding: LoaderSharding) -> None:
        self._dataset: Any = loader.dataset
        self.in_process = loader.num_workers == 0
        sampler_attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler: Any = getattr(loader, sampler_attribute)
        # Without automatic batching, an index stands for a whole batch, unless the sampler yields lists of indices.
        prebatched = sampler_attribute == "sampler" and not isinstance(sampler, BatchSampler)
        multi_rank = sharding.world_size > 1
        rank_local = multi_rank and (not sharding.replace_sampler or _is_already_sharded(sampler, sharding.world_size))
        keyed = not self.in_process
        self._rank_sampler: RankSampler
        self._custom_samplers: tuple[Any, ...] = ()
        if sharding.replace_sampler and not rank_local and ShardedSampler.can_replace(sampler, prebatched):
            self._rank_sampler = ShardedSampler(sampler, sharding, prebatched, keyed)
        else:
            self._rank_sampler = ShardedCustomSampler(sampler, sharding, rank_local, prebatched, keyed)
            self._custom_samplers = self._rank_sampler.nested
        self._shares_unknown = multi_rank and (rank_local or prebatched)
        self._measure()
        if self.length == 0:
            raise no_batches_error(f"{type(loader).__name__} has no batch of its {self._size} samples")
        # The loader must yield batches in order, because each batch is paired with its share by position.
        attributes: dict[str, Any] = {sampler_attribute: self._rank_sampler, "in_order": True}
        if not self.in_process:
            attributes["dataset"] = SeededDataset(loader.dataset, sharding.seed, sharding.rank)
            attributes["worker_init_fn"] = WorkerInit(loader.worker_init_fn)
        self._clone = LoaderClone(loader, **attributes)
        self._prebatched = prebatched
        self._custom_iteration = _has_custom_iteration(loader)
        self.length_is_exact = self._rank_sampler.length_is_exact and not self._custom_iteration
        self.shares_known = not self._shares_unknown and not (self._custom_iteration and multi_rank)
        self.stride = None if rank_local else _stride(loader, prebatched, sharding.world_size)
        if multi_rank and not rank_local:
            from drivetrain._data.order_fingerprint import subset_fingerprint  # imported only with several ranks

            self.subset = subset_fingerprint(loader.dataset)
        # Every rank iterates the whole of a custom sampler, unless the sampler is local to the rank.
        self.needs_order_check = multi_rank and not rank_local and bool(self._custom_samplers)
        self.fresh_memory = allocates_each_batch(loader)

    def _measure(self) -> None:
        self.length, self._size = self._rank_sampler.length, len_or_none(self._dataset)
        self.samples = None if self._shares_unknown else self._size

    def refresh(self) -> bool:
        before = self._size, self.length
        self._rank_sampler.refresh()
        self._measure()
        if (self._size, self.length) == before:
            return False
        if self.length == 0:
            raise no_batches_error(f"the data set has no batch: its size went from {before[0]} to {self._size} samples")
        self.close()  # Persistent workers have a copy of the data set as it was when they started.
        return True

    def shares(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare] | None:
        # The size of a prebatched batch, and the batches of a loader with custom iteration, are unknown until read.
        return None if self._prebatched or self._custom_iteration else self._rank_sampler.shares(start, origin)

    def requested_indices(self) -> Iterator[list[Any]] | None:
        # If prebatched, an index stands for a whole batch. With custom iteration, batches may differ from the requests.
        if self._prebatched or self._custom_iteration:
            return None
        requested = self._rank_sampler.requested = deque()
        return drain(requested)

    def count(self, epoch: int) -> int | None:
        if self._custom_iteration:
            return None
        set_epoch(epoch, *self._custom_samplers)
        return self._rank_sampler.count(epoch)

    def epoch(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[tuple[Any, BatchShare]]:
        if origin.samples and self._shares_unknown:
            raise ConfigurationError(
                "a loader whose sampler is local to each rank cannot resume within an epoch at another world size",
                "the parts that the ranks' samplers select cannot be re-sharded",
                "resume on the same number of ranks, from a checkpoint at an epoch's end, or let Fit shard the data",
            )
        if self._custom_samplers:
            set_epoch(epoch, *self._custom_samplers)
        shares = self._rank_sampler.begin(epoch, start, origin)
        if self._prebatched or self._custom_iteration:
            return self._counted(shares, start)
        # `zip` is implemented in C, so no Python function runs per batch unless samples must be counted
        return zip(self._clone.iterate(), shares, strict=False)

    def order_fingerprints(self) -> list[OrderFingerprint]:
        from drivetrain._data.order_fingerprint import OrderFingerprint, digest_of_indices

        self.needs_order_check = False
        first_groups = getattr(self._rank_sampler, "first", None)
        digest = None if first_groups is None else digest_of_indices([group.indices for group in first_groups])
        return [OrderFingerprint(_custom_sampler_name(self._custom_samplers), digest, common=True)]

    def state_dict(self) -> dict[str, Any]:
        return self._rank_sampler.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rank_sampler.state = {name: state[name] for name in self._rank_sampler.state}

    def close(self) -> None:
        self._clone.close()

    def _counted(self, shares: Iterator[BatchShare], start: int) -> Iterator[tuple[Any, BatchShare]]:
        """Yield all batches that the loader yields, each with the number of samples that the batch itself shows.

        A loader with custom iteration may yield more or fewer batches than its sampler requests.
        """
        name = type(self._clone.loader).__name__
        if start and self._custom_iteration:
            logger.warning(
                "%s overrides the iteration of DataLoader. It resumes at batch %d of the epoch only if it yields one "
                "batch for each batch that its sampler requests.",
                name,
                start,
            )
        position, is_empty = 0, start == 0
        for batch in self._clone.iterate():
            share, is_empty = next(shares, None) or BatchShare(0, None, False, position), False
            samples = 0 if share.joins else count_samples(batch)
            yield batch, share._replace(samples=samples, total=samples if self.shares_known else None)
            position = share.start + samples
        if is_empty:
            raise no_batches_error(f"{name} yielded no batch")


def _is_already_sharded(sampler: Any, world_size: int) -> bool:
    """Return whether the ``rank`` and ``num_replicas`` of a sampler show that it yields only one rank's part."""
    return any(
        type(part) is not DistributedSampler
        and hasattr(part, "rank")
        and getattr(part, "num_replicas", 0) == world_size
        for part in nested_samplers(sampler)
    )


def _custom_sampler_name(samplers: tuple[Any, ...]) -> str:
    """Return the class name of the outermost sampler that is not torch's, or of the innermost sampler if all are."""
    not_from_torch = [part for part in samplers if not type(part).__module__.startswith("torch.")]
    return type(not_from_torch[0] if not_from_torch else samplers[-1]).__name__


def _has_custom_iteration(loader: DataLoader[Any]) -> bool:
    """Return whether a subclass overrides iteration, and may yield more or fewer batches than its sampler requests."""
    for name in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if owner.__module__.partition(".")[0] not in _TRUSTED_PACKAGES:
            return True
    return False


def _stride(loader: DataLoader[Any], prebatched: bool, world_size: int) -> int | None:
    if prebatched:
        return world_size
    return None if loader.batch_size is None else world_size * loader.batch_size
