"""The control plane: small CPU-side talk between ranks, kept off the device's queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.failure import AbsentRanksError, Failure
from drivetrain.errors import DistributedError

_SHOWN = 8  # different stacks that are told
_SILENT = "Its process has ended, or hangs where no thread of Python's runs."


class Pending(Protocol):
    """A reduction on its way."""

    def wait(self) -> torch.Tensor:
        """Return the result, waiting for it where it has not come yet."""


class ControlPlane(Protocol):
    """What the engine says between ranks besides the strategy's own collectives.

    Unless they say otherwise, its methods are collective: all ranks call them, in the same order.
    """

    rank: int
    world_size: int
    external_failures: Callable[[], Sequence[Failure]]
    """What somebody else, who watches the processes, knows of failures."""

    @property
    def store(self) -> Store | None:
        """Shared key-value store under this run's own prefix; None for a single process."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather a CPU tensor of shape (n,), the same n everywhere, into (W, n)."""

    def all_reduce_async(self, values: torch.Tensor) -> Pending:
        """Begin to sum a CPU tensor of shape (n,) over the ranks."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on every rank: plain ones, that `plain_values.encode` takes."""

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank, on every rank: the plane opens none of them.

        For objects of the user's own, which travel as pickles between the ranks of one job, and for nothing else.
        """

    def barrier(self) -> None:
        """Wait for all ranks."""

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send contiguous CPU tensors, and receive into others, by rank; return once all of them have travelled.

        Not collective: who has nothing to send to a rank and nothing to receive from it need not call. Between two
        ranks, what is sent first is received first.
        """

    def clone(self) -> ControlPlane:
        """Return another control plane over the same ranks, for a thread beside this one. It ends with this one."""

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value on every rank: a plain one, as for `gather_objects`.

        Goes through the store: no collective is issued.
        """

    def agree(self, purpose: str, *flags: bool, timeout: timedelta | None = None) -> tuple[int, ...]:
        """Count, for each flag, the ranks that raise it. Goes through the store: no collective is issued.

        Args:
            purpose: what is agreed on, alike on every rank.
            flags: this rank's, two at most.
            timeout: how long to wait for the others; None is as long as for any collective.

        Raises:
            DistributedError: a rank came for another purpose, or not within ``timeout``; it is named.
        """

    def after_first_step(self) -> None:
        """Wait less for the others from now on. Not collective."""

    def whereabouts(self, ranks: Sequence[int] | None = None, late: bool = False) -> dict[int, str | None]:
        """Ask ranks, all others by default, for their stacks; who does not answer has None. Not collective.

        Where they are ``late``, every rank leaves its last collectives too, as `keep_records` has said.
        """

    def keep_records(self, folder: str | None) -> None:
        """Let this rank leave its last collectives in ``folder`` where somebody waits in vain. Not collective."""

    def records(self) -> str | None:
        """Return which files they were left in, a pattern for those of all ranks; None where none was."""

    def report_failure(self, failure: Failure) -> None:
        """Tell the others. Not collective."""

    def first_failure(self, wait: timedelta | None = None) -> Failure | None:
        """Return the first failure that is a cause, if one is reported within ``wait``. Not collective.

        Else an account of ranks that did not come, if there is one: it may be all that will ever be known.
        """

    def leave(self) -> None:
        """Part at the end of a run: who hosts the store stays until nobody reads from it any more."""

    def all_failures(self, wait: timedelta) -> list[Failure]:
        """Return what is reported, as soon as all ranks have failed or ``wait`` is over. Not collective."""

    def everybody_failed(self) -> bool:
        """Whether all ranks have reported a failure: no further one will come. Not collective."""

    def silent_ranks(self) -> list[int]:
        """Return the ranks that have not reported a failure. Not collective."""

    def settle(self, wait: timedelta) -> None:
        """Linger after a failure, ``wait`` at most, until all ranks have seen it. Not collective."""


class _Ready:
    """A result that is already there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        return self._values


class LocalControl:
    """The control plane of a single process: everybody agrees with itself."""

    rank = 0
    world_size = 1
    store: Store | None = None
    external_failures: Callable[[], Sequence[Failure]] = tuple

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.unsqueeze(0)

    def all_reduce_async(self, values: torch.Tensor) -> Pending:
        return _Ready(values)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        return [content]

    def barrier(self) -> None:
        return None

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        if sends or receives:
            raise ValueError("a single process has nobody to talk to")

    def clone(self) -> ControlPlane:
        return LocalControl()

    def from_rank_0(self, value: Any) -> Any:
        return value

    def agree(self, purpose: str, *flags: bool, timeout: timedelta | None = None) -> tuple[int, ...]:
        return tuple(int(flag) for flag in flags)

    def after_first_step(self) -> None:
        return None

    def whereabouts(self, ranks: Sequence[int] | None = None, late: bool = False) -> dict[int, str | None]:
        return {}

    def keep_records(self, folder: str | None) -> None:
        return None

    def records(self) -> str | None:
        return None

    def report_failure(self, failure: Failure) -> None:
        return None

    def first_failure(self, wait: timedelta | None = None) -> Failure | None:
        return None

    def leave(self) -> None:
        return None

    def all_failures(self, wait: timedelta) -> list[Failure]:
        return []

    def everybody_failed(self) -> bool:
        return True

    def silent_ranks(self) -> list[int]:
        return []

    def settle(self, wait: timedelta) -> None:
        return None


def absent_error(
    what: str, why: str, fix: str, where: Mapping[int, str | None], records: str | None = None
) -> DistributedError:
    """Return the error for ranks that did not come in time.

    Args:
        what: who waited for whom.
        why: what is known of the reason.
        fix: what to look for.
        where: what `ControlPlane.whereabouts` gave.
        records: what `ControlPlane.records` gave.
    """
    ranks, lines = list(where), []
    for stack, indices in spread(list(where.values())).items():
        told = f"at work, innermost call first:\n{stack}" if stack else f"no answer. {_SILENT}"
        lines.append(f"rank(s) {[ranks[index] for index in indices]}: {told}")
    lines = lines[:_SHOWN]
    if records is not None:
        lines.append(f"The last collectives of each rank: {records}")
    kind = DistributedError if None in where.values() else AbsentRanksError
    return kind(what, "\n".join([why, "Where they are:", *lines]), fix)


def spread(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Group ranks by the value they hold, first seen first: ``["a", "b", "a"]`` gives ``{"a": [0, 2], "b": [1]}``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
