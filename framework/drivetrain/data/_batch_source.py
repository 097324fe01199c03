"""BatchSource: what the loops read batches from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from drivetrain.data._sharding import EPOCH_START, BatchShard, ShardingOrigin

if TYPE_CHECKING:
    from drivetrain.data._order_fingerprint import OrderFingerprint

NO_BATCH: Any = object()
"""Stands where no batch has come yet; None may be one."""


class BatchSource(Protocol):
    """What the loops read batches from.

    Attributes:
        length: micro-batches that an epoch is said to have, the same on every rank; None where nothing says.
        certain: ``length`` is not only said: an epoch has no more and no fewer.
        samples: of the data set, the same on every rank; None where it is not known, or each rank's own.
        static: the shares of all ranks, and when the epoch ends, are known without talking.
        in_process: batches are read in this process, and what reading them draws comes from its generators.
        stateful: where reading stands is in an object that a checkpoint keeps: nothing may be read ahead of training.
        stride: samples in a whole global micro-batch; None where that is not known.
        lasting: a batch stays as it is while later ones are read: none of them can come in the same memory.
        subset: which samples of a larger data set it reads, in JSON-able values that must be alike on every rank; None
            where it reads all, or each rank its own.
        to_compare: ranks might go through different orders, or read the same where each should read its own: what
            they have read first is to be compared. `order_fingerprints` ends it.
    """

    @property
    def length(self) -> int | None: ...

    @property
    def length_is_exact(self) -> bool: ...

    @property
    def samples(self) -> int | None: ...

    @property
    def shards_known(self) -> bool: ...

    @property
    def in_process(self) -> bool: ...

    @property
    def stateful(self) -> bool: ...

    @property
    def stride(self) -> int | None: ...

    @property
    def fresh_memory(self) -> bool: ...

    @property
    def subset(self) -> list[Any] | None: ...

    @property
    def needs_order_check(self) -> bool: ...

    def shards(self, epoch: int, start: int = 0, origin: ShardingOrigin = EPOCH_START) -> Iterator[BatchShard] | None:
        """Return the shares that `epoch` gives with its batches, without reading any; None where only reading tells."""
        ...

    def indices(self, epoch: int) -> Iterator[list[Any]] | None:
        """Return the data-set indices of this rank's batches without reading any; None where only reading tells."""
        ...

    def requested_indices(self) -> Iterator[list[Any]] | None:
        """Return the data-set indices of the batches that `epoch`, called next, gives: with each batch, the next ones.

        None where the samples of a batch have no indices, or they are not known.
        """
        ...

    def epoch(
        self, epoch: int, start: int = 0, origin: ShardingOrigin = EPOCH_START
    ) -> Iterator[tuple[Any, BatchShard]]:
        """Start an epoch and return its batches with this rank's shares of them.

        Args:
            epoch: which one; it decides the order.
            start: the micro-batch to begin with.
            origin: what of the epoch was trained on under another dealing; the rest is dealt as an epoch of its own,
                its micro-batches numbered from ``origin.number`` on.

        Raises:
            ConfigurationError: the source cannot deal the rest of an epoch anew.
        """
        ...

    def count(self, epoch: int) -> int | None:
        """Return how many micro-batches an epoch has, where that can be told for sure without reading them."""
        ...

    def order_fingerprints(self) -> list[OrderFingerprint]:
        """Return what was read first, once a batch has come; where ``needs_order_check``, as many entries on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs, besides the number of micro-batches, to go on within the epoch under way."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, before `epoch` is called with a start within that epoch."""
        ...

    def close(self) -> None:
        """Let go of workers. The source can be started again."""
        ...
