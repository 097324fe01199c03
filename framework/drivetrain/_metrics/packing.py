"""Many scalars, one transfer and one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import torch

from drivetrain._distributed.control_plane import ControlPlane, spread
from drivetrain.errors import DistributedError

_CHUNK = 256  # doubles in the collective that every rank can enter without knowing the others' keys
_HEADER = 4  # how it takes part, how many values, and the two halves of the keys' hash


class Readback:
    """Scalars on their way to the host: one copy for each device they are on, begun as this is made.

    The copy from a CUDA device goes to pinned memory, behind the work that the device has been given; the host goes on.
    From other devices the numbers are here at once.

    Args:
        values: numbers and one-element tensors, or a tensor of shape (numbers,). A tensor may be written to again, on
            the same stream, as soon as this is made.
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
            wide = torch.float32 if device.type == "mps" else torch.float64
            self._send(indices, torch.stack([values[index].detach().reshape(()).to(wide) for index in indices]))  # type: ignore[union-attr]

    @property
    def has_arrived(self) -> bool:
        """Whether `numbers` need not wait. It asks the device, and does not wait either."""
        return all(event.query() for _, _, event in self._copies)  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        """Return the numbers, in the order of the values. Waits for those that have not arrived."""
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
    """Bring scalars over with one copy for each device they are on, and wait for them."""
    return Readback(values).numbers()


class Part(IntEnum):
    """How a rank takes part in a reduction."""

    NONE = 0
    """It had no data, and knows no key."""
    SOME = 1
    """It had no data, or none of one of several loaders, or was not there from the epoch's beginning.

    So it may know fewer keys: those that hooks logged, say.
    """
    WHOLE = 2
    """Its keys are those of the others."""


def gather_packed(
    control: ControlPlane, keys: Sequence[str], numbers: Sequence[float], part: Part
) -> tuple[list[str], torch.Tensor]:
    """Gather every rank's numbers in one collective (more only where they do not fit, or a rank had no data).

    Args:
        control: the way to the other ranks.
        keys: what the numbers stand for, in order: two of them a key. Keys at the end may have none. A name, an
            operation and more, separated by tabs.
        numbers: this rank's.
        part: how it takes part.

    Returns:
        the keys, and the numbers of shape (ranks that take part, 2 * keys with numbers), in double precision; zeros for
        what a rank without data does not know.

    Raises:
        DistributedError: the ranks' keys differ; names those that are not everywhere, on every rank.
    """
    digest = hashlib.blake2b("\n".join(keys).encode(), digest_size=8).digest()
    header = [
        float(part),
        float(len(numbers)),
        float(int.from_bytes(digest[:4], "big")),
        float(int.from_bytes(digest[4:], "big")),
    ]
    first = torch.zeros(_CHUNK, dtype=torch.float64)
    payload = torch.tensor(numbers, dtype=torch.float64)
    room = _CHUNK - _HEADER
    first[:_HEADER] = torch.tensor(header, dtype=torch.float64)
    first[_HEADER : _HEADER + min(room, len(numbers))] = payload[:room]
    gathered = control.all_gather(first)
    headers = gathered[:, :_HEADER]
    if not bool((headers == headers[0]).all()):
        return _gather_apart(control, keys, numbers, part)
    count = len(numbers)
    parts = [gathered[:, _HEADER : _HEADER + min(count, room)]]
    if count > room:
        parts.append(control.all_gather(payload[room:]))
    return list(keys), torch.cat(parts, dim=1)


def _gather_apart(
    control: ControlPlane, keys: Sequence[str], numbers: Sequence[float], part: Part
) -> tuple[list[str], torch.Tensor]:
    """Gather from ranks that do not all know the same keys, as some had no data; refuse what differs otherwise."""
    told = control.gather_objects((int(part), list(keys), list(numbers)))
    everybody: list[tuple[Part, list[str], list[float]]] = [(Part(one), own, values) for one, own, values in told]
    whole = [own for part, own, _ in everybody if part is Part.WHOLE]
    counted = {key for _, own, values in everybody for key in own[: len(values) // 2]}
    # Where no rank had all data, none knows all keys.
    known = (
        whole[0]
        if whole
        else sorted({key for _, own, _ in everybody for key in own}, key=lambda k: (k not in counted, k))
    )
    if any(own != known for own in whole) or any(not set(own) <= set(known) for _, own, _ in everybody):
        _refuse([own if part is not Part.NONE else None for part, own, _ in everybody])
    rows = []
    for part, own, values in everybody:
        if part is not Part.NONE:
            pairs = {key: values[2 * index : 2 * index + 2] for index, key in enumerate(own)}
            rows.append([number for key in known if key in counted for number in pairs.get(key, (0.0, 0.0))])
    return known, torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 2 * len(counted))


def _refuse(keys_by_rank: list[list[str] | None]) -> None:
    everywhere = [set(keys) for keys in keys_by_rank if keys is not None]
    first = everywhere[0]
    odd = sorted(first.union(*everywhere) - first.intersection(*everywhere))
    lines = []
    for key in odd[:20]:
        logged = spread([None if keys is None else key in keys for keys in keys_by_rank])
        name, operation = key.split("\t")[:2]
        several = sum(other.startswith(f"{name}\t") for other in odd) > 1
        shown = f"{name!r} ({operation})" if several else repr(name)
        lines.append(f"{shown} on rank(s) {logged[True]} and not on {logged[False]}")
    raise DistributedError(
        f"The logged keys differ between ranks: {'; '.join(lines)}.",
        "an epoch's values are reduced over all ranks together.",
        "log the same keys on every rank, or with sync_dist=False where a value is a rank's own.",
    )


def combined(operation: str, totals: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
    """Combine the ranks' totals and weights, each of shape (ranks,), into one number; None where nothing was logged.

    In double precision, as the totals are: a count of tokens soon outgrows single precision.
    """
    heard = weights > 0
    if not bool(heard.any()):
        return None
    if operation == "mean":
        value = totals.sum() / weights.sum()
    elif operation == "sum":
        value = totals.sum()
    else:
        value = totals[heard].amax() if operation == "max" else totals[heard].amin()
    return value
