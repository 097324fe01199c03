"""A `BatchSource` over an iterable data set, of which each rank reads a separate part in order."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterDataPipe

from drivetrain._data.batch_source import NO_BATCH, BatchSource
from drivetrain._data.loader_copy import LoaderClone, allocates_each_batch
from drivetrain._data.samplers import len_or_none
from drivetrain._data.sharding import EPOCH_START, BatchShare, EpochOffset
from drivetrain._data.worker_seeding import SeededIterable, WorkerInit
from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain._runtime.transfer import samples_in
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._data.order_fingerprint import OrderFingerprint

logger = logging.getLogger("drivetrain")

_CPU = torch.device("cpu")


class IterableSource(BatchSource):
    """`BatchSource` over a `DataLoader` with an iterable data set, or over any iterable of batches.

    Starting within an epoch reads and drops the earlier batches, unless the loader, or a data set that is read in
    this process, has ``state_dict`` and ``load_state_dict``.

    Args:
        loader: a `DataLoader` over an iterable data set, or any iterable of batches.
        rank: this process's data rank.
        world_size: the number of data ranks.
        seed: the seed for the workers' random generators.
    """

    def __init__(self, loader: Any, rank: int, world_size: int, seed: int) -> None:
        self._loader = loader
        self._dataset = getattr(loader, "dataset", loader)
        self._clone: LoaderClone | None = None
        self._seeded: SeededIterable | None = None
        self.shares_known = world_size == 1
        self.needs_order_check = not (self.shares_known or getattr(self._dataset, "is_split_by_rank", False))
        self._first_digest: str | None = None
        self.in_process = getattr(loader, "num_workers", 0) == 0
        self.length: int | None = None
        self.refresh()
        self.length_is_exact = isinstance(loader, list | tuple)
        self._last_skipped: Any = NO_BATCH
        if isinstance(loader, DataLoader):
            # Without this attribute, torch warns about a wrong length at every batch and on every rank.
            attributes: dict[str, Any] = {"_IterableDataset_len_called": None}
            if loader.num_workers > 0:
                attributes["worker_init_fn"] = WorkerInit(loader.worker_init_fn)
                # torch seeds and shards a DataPipe and recognises it by its type, so no proxy replaces it.
                if not isinstance(loader.dataset, IterDataPipe):
                    self._seeded = attributes["dataset"] = SeededIterable(loader.dataset, seed, rank, world_size)
            self._clone = LoaderClone(loader, **attributes)
        # Other iterables may reuse the memory of their batches.
        self.fresh_memory = type(loader) in (list, tuple) or (
            isinstance(loader, DataLoader) and allocates_each_batch(loader)
        )
        self._stateful_object = self._find_stateful_object()
        self.stateful = self._stateful_object is not None
        self._rng_at_epoch_start: Any = None
        self._loaded_state: Mapping[str, Any] | None = None  # None once an epoch is started from it
        self._ended = False

    def epoch(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[tuple[Any, BatchShare]]:
        if origin.samples:
            raise ConfigurationError(
                f"{type(self._loader).__name__} cannot resume within an epoch with another world size or batch size.",
                "each rank reads its own part of an iterable data set, and these parts cannot be re-sharded.",
                "resume on the same number of ranks with the same batch size, or from a checkpoint at an epoch's end.",
            )
        set_epoch(epoch, self._loader, None if self._dataset is self._loader else self._dataset)
        if self._seeded is not None:
            self._seeded.set_epoch_number(epoch)
        state_is_loaded, self._loaded_state = self._loaded_state is not None, None
        ended, self._ended = self._ended and start > 0, False
        if ended and state_is_loaded:  # this rank's part of the data is shorter than those of other ranks
            self._ended = True
            return iter(())
        if start == 0 or state_is_loaded:
            self._rng_at_epoch_start = generator_states(_CPU) if self.in_process and not self.stateful else None
            return self._iterate(self._batches(), 0, start)
        if self._rng_at_epoch_start is not None:
            restore_generators(self._rng_at_epoch_start, _CPU)
        batches = self._batches()
        return self._iterate(batches, self._skip(batches, start), start)

    def order_fingerprints(self) -> list[OrderFingerprint]:
        from drivetrain._data.order_fingerprint import OrderFingerprint

        self.needs_order_check = False
        return [OrderFingerprint(type(self._dataset).__name__, self._first_digest, common=False)]

    def state_dict(self) -> dict[str, Any]:
        if self._loaded_state is not None:  # the object may return its loaded state only after it has begun to read
            return dict(self._loaded_state)
        return {
            "began": self._rng_at_epoch_start,
            "state": None if self._stateful_object is None else self._stateful_object.state_dict(),
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng_at_epoch_start = state["began"]
        if self._stateful_object is not None and state["state"] is not None:
            self._stateful_object.load_state_dict(state["state"])
            self._loaded_state = state
            self._ended = state["ended"]

    def refresh(self) -> bool:
        before, self.length = self.length, len_or_none(self._loader)
        if self.length == 0:
            raise no_batches_error(f"{type(self._loader).__name__} has length 0")
        return self.length != before

    def close(self) -> None:
        if self._clone is not None:
            self._clone.close()

    def joining_batch(self) -> Any:
        """Return a batch with which a rank joins the steps of others if no batch is left when it resumes an epoch.

        Returns:
            The last batch that was skipped, or the first of another epoch; `NO_BATCH` if there is none.
        """
        if self._last_skipped is not NO_BATCH or self._stateful_object is None:
            return self._last_skipped
        state, generators = copy.deepcopy(self._stateful_object.state_dict()), generator_states(_CPU)
        batch = next(iter(self._batches()), NO_BATCH)
        self._stateful_object.load_state_dict(state)
        restore_generators(generators, _CPU)
        return batch

    def _find_stateful_object(self) -> Any:
        candidates = [self._loader if self._clone is None else self._clone.loader]
        if self.in_process:
            candidates.append(self._dataset)
        stateful = (each for each in candidates if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
        return next(stateful, None)

    def _batches(self) -> Iterator[Any]:
        return self._clone.iterate() if self._clone is not None else iter(self._loader)

    def _skip(self, batches: Iterator[Any], count: int) -> int:
        """Read and drop ``count`` batches; return the number of samples in the dropped batches."""
        logger.warning(
            "Reading %d batch(es) of %s again to skip them, because they were trained on already. A data set with "
            "state_dict() and load_state_dict() resumes without reading them.",
            count,
            type(self._dataset).__name__,
        )
        position = 0
        for _, batch in zip(range(count), batches, strict=False):
            position += count_samples(batch)
            self._last_skipped = batch
        return position

    def _iterate(self, batches: Iterator[Any], position: int, start: int) -> Iterator[tuple[Any, BatchShare]]:
        has_batch = False
        for batch in batches:
            if not has_batch and self.needs_order_check:
                from drivetrain._data.order_fingerprint import digest_of_batch

                self._first_digest = digest_of_batch(batch)  # computed before the step, which may modify the batch
            has_batch = True
            samples = count_samples(batch)
            yield batch, BatchShare(samples, samples if self.shares_known else None, False, position)
            position += samples
        self._ended = True
        if not has_batch and start == 0:
            hint = " (an iterator can be read only once: pass an iterable)" if batches is self._loader else ""
            raise no_batches_error(f"{type(self._loader).__name__} yielded no batch{hint}")


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor, or 1 if it has no tensor."""
    samples = samples_in(batch)
    if samples is None:
        warnings.warn(
            f"a batch of type {type(batch).__name__} holds no tensor, so it counts as one sample. Override "
            "`batch_weight(batch)` in the module to return its weight.",
            stacklevel=2,
        )
        return 1
    return samples


def set_epoch(epoch: int, *parts: Any) -> None:
    """Call ``set_epoch(epoch)`` on each object that has this method."""
    for part in parts:
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)


def no_batches_error(message: str) -> ConfigurationError:
    """Return the error for a loader without batches."""
    return ConfigurationError(
        message,
        "an epoch needs at least one batch",
        "check the data set; with drop_last=True it must hold at least batch_size * world_size samples",
    )
