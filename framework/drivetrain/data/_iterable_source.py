"""Iterable data: each rank reads its own part, in the order in which it comes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterDataPipe

from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain._runtime.transfer import samples_in
from drivetrain.data._batch_source import NO_BATCH
from drivetrain.data._loader_copy import LoaderClone, gives_new_memory
from drivetrain.data._samplers import sized
from drivetrain.data._sharding import START, Origin, Share
from drivetrain.data._worker_seeding import SeededIterable, WorkerStart
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.data._order_fingerprint import FirstSight

logger = logging.getLogger("drivetrain")

_HOST = torch.device("cpu")


class IterableSource:
    """Batches of an iterable data set, or of any iterable: each rank's own part.

    A start within an epoch reads what comes before it and drops it, unless the loader, or a data set that is read in
    this process, has ``state_dict`` and ``load_state_dict``: then it goes on at once.

    Args:
        loader: a `DataLoader` over an iterable data set, or any iterable of batches.
        rank: this rank.
        world_size: how many there are.
        seed: the seed of the workers' draws.
    """

    def __init__(self, loader: Any, rank: int, world_size: int, seed: int) -> None:
        self._loader = loader
        self._clone: LoaderClone | None = None
        self._seeded: SeededIterable | None = None
        self._single = world_size == 1
        self.static = self._single
        self.subset = None
        self.to_compare = not self._single and not getattr(
            getattr(loader, "dataset", loader), "is_split_by_rank", False
        )
        self._first: str | None = None
        self.samples = None
        self.stride = None
        self.in_process = getattr(loader, "num_workers", 0) == 0
        self.length = sized(loader)
        self.certain = isinstance(loader, list | tuple)
        self.last: Any = NO_BATCH
        """The last batch that was skipped: it may be the last of this rank's part."""
        if self.length == 0:
            raise empty(f"{type(loader).__name__} has length 0")
        if isinstance(loader, DataLoader):
            # Else torch warns of a length that proves wrong, at every batch, and each rank for itself.
            attributes: dict[str, Any] = {"_IterableDataset_len_called": None}
            # A DataPipe is seeded and sharded by torch, which has to see its type.
            if loader.num_workers > 0 and not isinstance(loader.dataset, IterDataPipe):
                self._seeded = SeededIterable(loader.dataset, seed, rank, world_size)
                attributes |= {"dataset": self._seeded, "worker_init_fn": WorkerStart(loader.worker_init_fn)}
            self._clone = LoaderClone(loader, **attributes)
        # A list runs no code when it is read; of any other iterable nothing is known.
        self.lasting = type(loader) in (list, tuple) or (isinstance(loader, DataLoader) and gives_new_memory(loader))
        self._stateful = self._with_state()
        self.stateful = self._stateful is not None
        self._began: Any = None  # where the process's generators stood as the epoch began
        self._goes_on = False

    def shares(self, epoch: int, start: int = 0, origin: Origin = START) -> None:
        """Nobody knows how many samples a batch holds before it is there."""
        return

    def indices(self, epoch: int) -> None:
        """An iterable data set has none."""
        return

    def tell_indices(self) -> None:
        """An iterable data set has none."""
        return

    def epoch(self, epoch: int, start: int = 0, origin: Origin = START) -> Iterator[tuple[Any, Share]]:
        if origin.samples:
            raise ConfigurationError(
                f"{type(self._loader).__name__} cannot go on within an epoch at another world size or batch size.",
                "an iterable data set is each rank's own part, and nobody knows what the others' parts would become.",
                "resume on as many ranks with the same batch size, or from a checkpoint at an epoch's end.",
            )
        set_epoch(epoch, self._loader, getattr(self._loader, "dataset", None))
        if self._seeded is not None:
            self._seeded.begin(epoch)
        goes_on, self._goes_on = self._goes_on, False
        if start == 0 or goes_on:
            self._began = generator_states(_HOST) if self.in_process and not self.stateful else None
            return self._shares(self._batches(), 0, start)
        if self._began is not None:
            restore_generators(self._began, _HOST)
        batches = self._batches()
        return self._shares(batches, self._skip(batches, start), start)

    def count(self, epoch: int) -> int | None:
        return self.length if self.certain else None

    def seen_first(self) -> list[FirstSight]:
        from drivetrain.data._order_fingerprint import FirstSight

        self.to_compare = False
        return [FirstSight(type(getattr(self._loader, "dataset", self._loader)).__name__, self._first, common=False)]

    def state_dict(self) -> dict[str, Any]:
        return {"began": self._began, "state": None if self._stateful is None else self._stateful.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._began = state["began"]
        if self._stateful is not None and state["state"] is not None:
            self._stateful.load_state_dict(state["state"])
            self._goes_on = True

    def close(self) -> None:
        if self._clone is not None:
            self._clone.close()

    def _with_state(self) -> Any:
        candidates = [self._loader if self._clone is None else self._clone.loader]
        if self.in_process:
            candidates.append(getattr(self._loader, "dataset", None))
        return next((one for one in candidates if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")), None)

    def _batches(self) -> Iterator[Any]:
        return self._clone.iterate() if self._clone is not None else iter(self._loader)

    def _skip(self, batches: Iterator[Any], count: int) -> int:
        """Read what was trained on already; return how many samples it held."""
        logger.warning(
            "Reading %d batch(es) of %s again, to skip them: they were trained on already. A data set with "
            "state_dict() and load_state_dict() goes on at once.",
            count,
            type(getattr(self._loader, "dataset", self._loader)).__name__,
        )
        position = 0
        for _, batch in zip(range(count), batches, strict=False):
            position += count_samples(batch)
            self.last = batch
        return position

    def _shares(self, batches: Iterator[Any], position: int, start: int) -> Iterator[tuple[Any, Share]]:
        came = False
        for batch in batches:
            if not came and self.to_compare:
                from drivetrain.data._order_fingerprint import digest_of_batch

                self._first = digest_of_batch(batch)  # before a step takes it apart
            came = True
            samples = count_samples(batch)
            yield batch, Share(samples, samples if self._single else None, False, position)
            position += samples
        if not came and start == 0:
            once = " (an iterator gives its batches once: pass what makes one)" if batches is self._loader else ""
            raise empty(f"{type(self._loader).__name__} gave no batch{once}")


def count_samples(batch: Any) -> int:
    """Return how many samples a batch holds, as its first tensor has it."""
    samples = samples_in(batch)
    if samples is None:
        warnings.warn(
            f"a batch of type {type(batch).__name__} holds no tensor: it counts as one sample. Override "
            "`batch_weight(batch)` in the module to say what it weighs.",
            stacklevel=2,
        )
        return 1
    return samples


def set_epoch(epoch: int, *parts: Any) -> None:
    """Tell the epoch to whatever wants to know it."""
    for part in parts:
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)


def empty(what: str) -> ConfigurationError:
    """Return the error for a loader without a batch."""
    return ConfigurationError(
        what,
        "an epoch without a batch trains and measures nothing",
        "check the data set; with drop_last=True it must hold at least batch_size * world_size samples",
    )
