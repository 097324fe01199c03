"""The control plane: small CPU-side messages between ranks that never wait for the device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.failure import AbsentRanksError
from drivetrain._distributed.failure_exchange import FailureExchange
from drivetrain.errors import DistributedError, DrivetrainError


class ControlPlane:
    """Exchanges small values between ranks, separately from the strategy's collectives.

    The methods of this class do what a single process needs; `GroupControl` overrides them for several ranks. All
    methods are collective unless their docstring says otherwise: all ranks call them in the same order.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        store: the key-value store under the prefix of this run, which all ranks share. A single process has None.
        failures: how the ranks tell each other why they fail. A single process has None.
    """

    rank = 0
    world_size = 1
    store: Store | None = None
    failures: FailureExchange | None = None

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather a CPU tensor of shape (n,), the same n on every rank, into (W, n)."""
        return values.unsqueeze(0)

    def all_reduce_async(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum a CPU tensor of shape (n,) over the ranks. Return a function that waits for the sum."""
        return lambda: values

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank. `plain_values.encode` must accept the values."""
        return [value]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by rank, on every rank, without decoding them.

        This method is only for objects of the user, which the ranks of one job exchange as pickles.
        """
        return [content]

    def barrier(self) -> None:
        """Wait for all ranks."""

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send contiguous CPU tensors to ranks, receive tensors from ranks, and return when all transfers are complete.

        Not collective: a rank with nothing to send or receive need not call this method. Messages between two ranks
        keep their order.
        """
        if sends or receives:
            raise ValueError("a single process has no other ranks to exchange tensors with")

    def clone(self) -> ControlPlane:
        """Return a second control plane over the same ranks, for another thread. It ends together with this one."""
        return self

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank. `plain_values.encode` must accept the value.

        The value is passed through the store, without a collective of the process group.
        """
        return value

    def count_flags(self, purpose: str, *flags: bool, timeout: timedelta | None = None) -> tuple[int, ...]:
        """Return, for each flag, the number of ranks that raise the flag.

        The flags are passed through the store, without a collective of the process group.

        Args:
            purpose: a description of what the ranks agree on, which must be equal on all ranks.
            flags: this rank's flags, at most two.
            timeout: how long to wait for the other ranks; None is the timeout of the control plane.

        Raises:
            DistributedError: a rank called with another purpose, or did not call within ``timeout``. The message names
                the rank.
        """
        return tuple(int(flag) for flag in flags)

    def monitored_barrier(self, purpose: str, timeout: timedelta | None = None) -> None:
        """Wait until all ranks call with the same purpose. Errors name the ranks that do not, as in `count_flags`."""
        self.count_flags(purpose, timeout=timeout)

    def watch(self, poll: Callable[[Store], None]) -> None:
        """Call ``poll`` twice a second from another thread, with that thread's connection to the store. Not collective.

        Whatever this rank's main thread does or waits for, the calls continue until the run ends.
        """

    def wait_for(self, key: str, purpose: str) -> None:
        """Wait until a rank sets ``{key}/done`` in the store, after each rank has set ``{key}/{rank}``. Not collective.

        Args:
            key: the prefix of the keys.
            purpose: a description of what this rank waits for.

        Raises:
            RankFailedError: a rank has failed.
            DistributedError: a rank did not set its key within the control plane's timeout. The message names the rank.
        """

    def after_first_step(self) -> None:
        """Switch to the shorter timeout that applies after the first step. Not collective."""

    def collect_stacks(self, ranks: Sequence[int] | None = None, late: bool = False) -> dict[int, str | None]:
        """Return the stacks of ranks, by default of all other ranks. Not collective.

        A rank that does not answer has None.

        With ``late``, every rank also dumps its last collectives into the folder given to `set_record_folder`.
        """
        return {}

    def set_record_folder(self, folder: str | None) -> None:
        """Set the folder into which this rank dumps its last collectives if a rank waits too long. Not collective."""

    def records(self) -> str | None:
        """Return a glob pattern for the dumped files of all ranks, or None if nothing was dumped."""
        return None

    def leave(self) -> None:
        """Finish a run. The rank that hosts the store waits until the other ranks no longer read from the store."""


class LocalControl(ControlPlane):
    """The control plane of a single process."""


def absent_error(
    what: str, why: str, fix: str, stacks_by_rank: Mapping[int, str | None], records: str | None = None
) -> DistributedError:
    """Return the error for ranks that did not arrive in time.

    Args:
        what: a sentence that names the rank that waited and the ranks that did not arrive.
        why: the likely reason.
        fix: what the user should look for.
        stacks_by_rank: the result of `ControlPlane.collect_stacks`.
        records: the result of `ControlPlane.records`.
    """
    ranks, lines = list(stacks_by_rank), []
    for stack, indices in spread(list(stacks_by_rank.values())).items():
        running = f"running, innermost call first:\n{stack}"
        description = running if stack else "no answer. Its process has ended, or hangs outside of Python."
        lines.append(f"rank(s) {[ranks[index] for index in indices]}: {description}")
    if records is not None:
        lines.append(f"The last collectives of each rank: {records}")
    error_class = DistributedError if None in stacks_by_rank.values() else AbsentRanksError
    return error_class(what, "\n".join([why, "Where they are:", *lines]), fix)


def spread(values: Sequence[Any]) -> dict[Any, list[int]]:
    """Group ranks by value, in order of first appearance: ``["a", "b", "a"]`` gives ``{"a": [0, 2], "b": [1]}``."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


# Values that must be the same on all ranks


def check_ranks_agree(
    control: ControlPlane,
    values: Mapping[str, Any],
    why: str = "they would compute different things, or wait for each other forever.",
    fix: str = "look for a value that differs between ranks: an unseeded split, a flag, an environment variable.",
    compared: Any = None,
) -> None:
    """Check that all ranks have the same values. Collective.

    The ranks compare a digest through the store, and gather the values only if digests differ.

    Args:
        control: connects the ranks.
        values: this rank's values by name, serialisable as JSON.
        why: see `refuse_differences`.
        fix: see `refuse_differences`.
        compared: what the ranks compare in place of ``values``, if only a property of the values must be the same.

    Raises:
        DistributedError: see `refuse_differences`.
    """
    if control.world_size == 1:
        return
    if do_ranks_differ(control, "a comparison of values between ranks", values if compared is None else compared):
        refuse_differences(control.gather_objects(dict(values)), why, fix)


def do_ranks_differ(control: ControlPlane, purpose: str, value: Any) -> bool:
    """Return whether a value that can be serialised as JSON is not the same on all ranks. Collective.

    The ranks exchange a digest through the store.
    """
    digest = digest_of(value)
    (differing,) = control.count_flags(purpose, control.broadcast_object(digest) != digest)
    return differing > 0


def refuse_differences(
    values_by_rank: Sequence[Mapping[str, Any]],
    why: str,
    fix: str,
    error: type[DrivetrainError] = DistributedError,
) -> None:
    """Raise an error on every rank if a name does not have the same value on all ranks.

    Args:
        values_by_rank: the gathered values by name, serialisable as JSON.
        why: the reason why the values must be the same.
        fix: how to make them the same.
        error: the class of the error.

    Raises:
        DrivetrainError: of the class ``error``. The error lists each name with its values and their ranks.
    """
    differences = []
    for name in dict.fromkeys(chain.from_iterable(values_by_rank)):
        ranks_by_value = spread([_as_json(values[name]) if name in values else "missing" for values in values_by_rank])
        if len(ranks_by_value) > 1:
            listed = "; ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_by_value.items())
            differences.append(f"{name}: {listed}")
    if differences:
        raise error(f"The ranks do not agree on {' | '.join(differences)}.", why, fix)


def digest_of(value: Any) -> str:
    """Return a digest of a value that can be serialised as JSON, by which ranks compare values without sending them."""
    return hashlib.blake2b(_as_json(value).encode(), digest_size=16).hexdigest()


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
