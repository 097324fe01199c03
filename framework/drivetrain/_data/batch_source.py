"""BatchSource: how loops read batches, whatever the user's loader is; LimitedLoader: how many of them a run reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain._data.sharding import EPOCH_START, BatchShare, EpochOffset
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._data.order_fingerprint import OrderFingerprint

NO_BATCH: Any = object()
"""Marks the absence of a batch, since None may be a batch."""


class BatchSource(ABC):
    """Yields one rank's batches of an epoch, each with the `BatchShare` that describes it.

    Attributes:
        length: the number of micro-batches that the loader declares for an epoch, the same on every rank; None if the
            loader declares no length.
        length_is_exact: whether every epoch has exactly ``length`` micro-batches.
        samples: the number of samples in the data set, the same on every rank; None if it is unknown or differs
            between ranks.
        shares_known: whether every rank knows the shares of all ranks, and the epoch's end, without communication.
        in_process: whether batches are read in this process and draw from its random generators.
        stateful: whether the read position is in an object that checkpoints save, so that nothing may be read ahead
            of training.
        stride: the number of samples in a whole global micro-batch; None if it is unknown.
        fresh_memory: whether every batch is newly allocated, so that no later batch overwrites it.
        subset: a JSON-able description of the samples that are selected from a larger data set, which must be equal on
            every rank; None if all samples are read, or if each rank has its own data.
        needs_order_check: whether ranks have to compare what they read first. They might use different orders, or all
            read the same data although each rank should read a separate part. `order_fingerprints` sets this to False.
    """

    length: int | None
    length_is_exact: bool
    samples: int | None = None
    shares_known: bool
    in_process: bool
    stateful = False
    stride: int | None = None
    fresh_memory: bool
    subset: list[Any] | None = None
    needs_order_check = False

    @abstractmethod
    def epoch(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[tuple[Any, BatchShare]]:
        """Start an epoch and return its batches with their shares.

        Args:
            epoch: the epoch's number, which determines the order.
            start: the number of the first micro-batch to return.
            origin: the part of the epoch that was trained on with another sharding. The rest is sharded like a
                separate epoch, and its micro-batches are numbered from ``origin.number`` on.

        Raises:
            ConfigurationError: the source cannot re-shard the rest of an epoch.
        """

    @abstractmethod
    def refresh(self) -> bool:
        """Read the sizes of the data again, between two epochs; return whether they differ from those of before.

        Raises:
            ConfigurationError: the loader has no batch now.
        """

    @abstractmethod
    def order_fingerprints(self) -> list[OrderFingerprint]:
        """Return fingerprints of what was read first, equally many on every rank. Call this after a batch was read."""

    @abstractmethod
    def close(self) -> None:
        """Shut down the workers. Another `epoch` may start afterwards."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs, besides the micro-batch number, to resume within the epoch."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Call it before `epoch` with a start within that epoch."""

    def count(self, epoch: int) -> int | None:
        """Return the exact number of micro-batches of an epoch; None if it is known only after the batches are read."""
        return self.length if self.length_is_exact else None

    def shares(self, epoch: int, start: int = 0, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare] | None:
        """Return the shares that `epoch` yields without reading batches; None if they are known only after reading."""
        return None

    def requested_indices(self) -> Iterator[list[Any]] | None:
        """Return an iterator over the indices that the next call of `epoch` requests; advance it once per batch.

        Returns:
            The data-set indices of each batch; None if samples have no indices or the indices are unknown.
        """
        return None

    def joining_batch(self) -> Any:
        """Return a batch with which a rank joins the steps of others if no batch is left when it resumes an epoch.

        Returns:
            `NO_BATCH` if there is none.
        """
        return NO_BATCH


class LimitedLoader:
    """A source of batches, and how many of its micro-batches a run reads. `measure` sets the limit and the lengths.

    Args:
        source: yields this rank's batches.
        setting: the limit as a number of micro-batches or as a fraction; None for no limit.
        name: the name of the setting, for errors.
    """

    limit: int | None
    """The limit of micro-batches of an epoch; None if the epoch ends with its data."""
    length: int | None
    """The expected micro-batches of an epoch; None if they are unknown."""
    length_is_exact: bool
    """Whether ``length`` is exact, rather than a loader's estimate."""

    def __init__(self, source: BatchSource, setting: int | float | None, name: str) -> None:
        self.source = source
        self._setting = setting
        self._name = name

    def measure(self, length: int | None) -> None:
        """Set the limit and the expected length.

        Args:
            length: the loader's number of micro-batches, which is the same on all ranks; None if it is unknown.

        Raises:
            ConfigurationError: the limit is a fraction of an unknown length, or rounds down to 0.
        """
        limit = self._limit_of(length)
        expected = limit if length is None else length if limit is None else min(limit, length)
        self.limit, self.length = limit, expected
        is_exact = self.source.shares_known and self.source.length_is_exact
        self.length_is_exact = is_exact or (limit is not None and limit == expected)

    def _limit_of(self, length: int | None) -> int | None:
        setting, name = self._setting, self._name
        if setting is None or (isinstance(setting, float) and setting == 1.0):
            return None
        if isinstance(setting, int):
            return setting
        if setting == 0.0:
            return 0
        if length is None:
            raise ConfigurationError(
                f"{name}={setting} with a loader of unknown length.",
                "a fraction of an unknown length cannot be computed.",
                f"give the number of micro-batches as an int, such as {name}=100.",
            )
        limit = int(length * setting)
        if limit == 0:
            raise ConfigurationError(
                f"{name}={setting} of {length} micro-batches rounds down to 0.",
                "nothing would be trained or measured.",
                f"raise {name} to at least {1 / length:.3g}, or use 0 to leave the loader out.",
            )
        return limit
