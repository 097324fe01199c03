"""BatchSource: what the loops read batches from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from drivetrain.data.sharding import START, Origin, Share


class BatchSource(Protocol):
    """What the loops read batches from.

    Attributes:
        length: micro-batches of an epoch, the same on every rank; None where it is not known.
        samples: of the data set, the same on every rank; None where it is not known, or each rank's own.
        static: the shares of all ranks, and when the epoch ends, are known without talking.
        in_process: batches are read in this process, and what reading them draws comes from its generators.
        replays: a start within an epoch goes through what comes before it, drawing from this process's generators.
        stride: samples in a whole global micro-batch; None where that is not known.
    """

    @property
    def length(self) -> int | None: ...

    @property
    def samples(self) -> int | None: ...

    @property
    def static(self) -> bool: ...

    @property
    def in_process(self) -> bool: ...

    @property
    def replays(self) -> bool: ...

    @property
    def stride(self) -> int | None: ...

    def epoch(self, epoch: int, start: int = 0, origin: Origin = START) -> Iterator[tuple[Any, Share]]:
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

    def close(self) -> None:
        """Let go of workers. The source can be started again."""
        ...
