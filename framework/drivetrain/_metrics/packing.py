"""Packs many scalars into one device-to-host copy and one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from drivetrain._distributed.control_plane import ControlPlane, refuse_differences

_CHUNK = 256  # the number of doubles in the first collective, the same for any number of keys
_HEADER = 4  # the number of header values: the part, the number of values, and two halves of the keys' hash


class Readback:
    """Copies scalars to the host. The constructor starts one copy per device.

    The copy from a CUDA device goes to pinned memory, after the work that is already queued, and the host does not wait
    for this copy. The constructor waits for copies from other devices.

    Args:
        values: numbers and one-element tensors, or a tensor of shape (numbers,). The tensors may be overwritten on the
            same stream once the constructor has returned.
    """

    def __init__(self, values: Sequence[torch.Tensor | float] | torch.Tensor) -> None:
        self._numbers = [0.0] * len(values)
        self._copies: list[tuple[Sequence[int], torch.Tensor, torch.cuda.Event]] = []
        if isinstance(values, torch.Tensor):
            self._send(range(len(values)), values.detach())
            return
        by_device: dict[torch.device, list[int]] = {}
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                by_device.setdefault(value.device, []).append(index)
            else:
                self._numbers[index] = float(value)
        for device, indices in by_device.items():
            dtype = torch.float32 if device.type == "mps" else torch.float64
            self._send(indices, torch.stack([values[index].detach().reshape(()).to(dtype) for index in indices]))  # type: ignore[union-attr]

    @property
    def has_arrived(self) -> bool:
        """Whether `numbers` would return without waiting. Reading this property does not wait for the device."""
        return all(event.query() for _, _, event in self._copies)  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        """Wait for the copies if necessary, and return the numbers in the order of the values."""
        for indices, copy, event in self._copies:
            if not event.query():  # type: ignore[no-untyped-call]
                event.synchronize()
            self._take(indices, copy)
        self._copies = []
        return self._numbers

    def _send(self, indices: Sequence[int], packed: torch.Tensor) -> None:
        if packed.device.type != "cuda":
            self._take(indices, packed)
            return
        copy = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        copy.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(packed.device))
        self._copies.append((indices, copy, event))

    def _take(self, indices: Sequence[int], packed: torch.Tensor) -> None:
        for index, number in zip(indices, packed.tolist(), strict=True):
            self._numbers[index] = number


def to_host(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Copy scalars to the host with one copy per device, wait for the copies, and return the numbers."""
    return Readback(values).numbers()


def gather_packed(
    control: ControlPlane, keys: Sequence[str], numbers: Sequence[float], knows_all: bool
) -> tuple[list[str], torch.Tensor]:
    """Gather the numbers of all ranks in one collective, or in several if they do not fit or a rank had no data.

    Args:
        control: the control plane.
        keys: the keys of the numbers, in order, with two numbers per key. Keys at the end may have no numbers. A key
            consists of a name, an operation and further text, separated by tabs.
        numbers: this rank's numbers.
        knows_all: whether this rank knows all keys. A rank that had no data, lacked data from one of several loaders,
            or joined after the start of the epoch may know fewer, for example only the keys that hooks logged.

    Returns:
        The keys, and a double-precision tensor of shape (ranks, 2 * keys with numbers). It contains zeros for the keys
        that a rank does not know because it lacked data.

    Raises:
        DistributedError: the keys of the ranks differ. The message names the keys that some ranks lack.
    """
    digest = hashlib.blake2b("\n".join(keys).encode(), digest_size=8).digest()
    header = [
        float(knows_all),
        float(len(numbers)),
        float(int.from_bytes(digest[:4], "big")),
        float(int.from_bytes(digest[4:], "big")),
    ]
    first = torch.zeros(_CHUNK, dtype=torch.float64)
    payload = torch.tensor(numbers, dtype=torch.float64)
    capacity = _CHUNK - _HEADER
    first[:_HEADER] = torch.tensor(header, dtype=torch.float64)
    first[_HEADER : _HEADER + min(capacity, len(numbers))] = payload[:capacity]
    gathered = control.all_gather(first)
    headers = gathered[:, :_HEADER]
    if not bool((headers == headers[0]).all()):
        return _gather_differing(control, keys, numbers, knows_all)
    count = len(numbers)
    parts = [gathered[:, _HEADER : _HEADER + min(count, capacity)]]
    if count > capacity:
        parts.append(control.all_gather(payload[capacity:]))
    return list(keys), torch.cat(parts, dim=1)


def _gather_differing(
    control: ControlPlane, keys: Sequence[str], numbers: Sequence[float], knows_all: bool
) -> tuple[list[str], torch.Tensor]:
    """Gather the numbers of ranks whose headers differ.

    The keys may differ if a rank lacked data. Any other difference raises an error.
    """
    ranks: list[tuple[bool, list[str], list[float]]] = control.gather_objects((knows_all, list(keys), list(numbers)))
    complete = [rank_keys for whole, rank_keys, _ in ranks if whole]
    with_numbers = {key for _, rank_keys, values in ranks for key in rank_keys[: len(values) // 2]}
    # If no rank had all data, no rank knows all keys, so the keys of all ranks are joined.
    joined = {key for _, rank_keys, _ in ranks for key in rank_keys}
    known = complete[0] if complete else sorted(joined, key=lambda key: (key not in with_numbers, key))
    if joined != {*known} or any(rank_keys != known for rank_keys in complete):
        # A rank that had no data at all takes no part in the comparison.
        _refuse_different_keys([rank_keys if whole or rank_keys else known for whole, rank_keys, _ in ranks])
    rows = []
    for _, rank_keys, values in ranks:
        pairs = {key: values[2 * index : 2 * index + 2] for index, key in enumerate(rank_keys)}
        rows.append([number for key in known if key in with_numbers for number in pairs.get(key, (0.0, 0.0))])
    return known, torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 2 * len(with_numbers))


def _refuse_different_keys(keys_by_rank: list[list[str]]) -> None:
    """Raise the error about keys that differ between ranks."""
    refuse_differences(
        [dict.fromkeys((key.replace("\t", " ").strip() for key in keys), "logged") for keys in keys_by_rank],
        "an epoch's values are reduced over all ranks together.",
        "log the same keys on every rank; use sync_dist=False for values that belong to one rank.",
    )


def combine(operation: str, totals: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
    """Combine the totals and weights of all ranks into one number, or return None if no rank logged a value.

    Both tensors have shape (ranks,) and double precision, because single precision cannot represent large counts, for
    example of tokens.
    """
    logged = weights > 0
    if not bool(logged.any()):
        return None
    if operation == "mean":
        value = totals.sum() / weights.sum()
    elif operation == "sum":
        value = totals.sum()
    else:
        value = totals[logged].amax() if operation == "max" else totals[logged].amin()
    return value
