"""BatchSource: what the loops read batches from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from drivetrain.data.sharding import Share


class BatchSource(Protocol):
    """What the loops read batches from.

    Attributes:
        length: micro-batches of an epoch, the same on every rank; None where it is not known.
        samples: of the data set, the same on every rank; None where it is not known, or each rank's own.
        static: the shares of all ranks, and when the epoch ends, are known without talking.
    """

    @property
    def length(self) -> int | None: ...

    @property
    def samples(self) -> int | None: ...

    @property
    def static(self) -> bool: ...

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Share]]:
        """Start an epoch at micro-batch ``start`` and return its batches with this rank's shares of them."""
        ...

    def close(self) -> None:
        """Let go of workers. The source can be started again."""
        ...
