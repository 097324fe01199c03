"""Many scalars, one transfer and one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from drivetrain.control import ControlPlane, spread
from drivetrain.errors import DistributedError

_CHUNK = 256  # doubles in the collective that every rank can enter without knowing the others' keys
_HEADER = 4  # takes part, how many values, and the two halves of the keys' hash


def to_host(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Bring scalars over with one copy per device they are on."""
    by_device: dict[torch.device, list[int]] = {}
    result = [0.0] * len(values)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(index)
        else:
            result[index] = float(value)
    for device, indices in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        packed = torch.stack([values[index].to(wide) for index in indices])  # type: ignore[union-attr]
        for index, number in zip(indices, packed.tolist(), strict=True):
            result[index] = number
    return result


def gather_packed(
    control: ControlPlane, keys: Sequence[str], numbers: Sequence[float], takes_part: bool
) -> tuple[list[str], torch.Tensor]:
    """Gather every rank's numbers in one collective (more only where they do not fit its fixed size).

    Args:
        control: the way to the other ranks.
        keys: what the numbers stand for, in order.
        numbers: this rank's.
        takes_part: False for a rank that had no data and so does not know the keys.

    Returns:
        the keys, and the numbers of shape (ranks that take part, len(numbers)), in double precision.

    Raises:
        DistributedError: the ranks' keys differ; names those that are not everywhere, on every rank.
    """
    digest = hashlib.blake2b("\n".join(keys).encode(), digest_size=8).digest()
    header = [
        float(takes_part),
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
    present = gathered[:, 0] > 0
    headers = gathered[present, 1:_HEADER]
    if len(headers) == 0:
        return [], torch.zeros(0, 0, dtype=torch.float64)
    if not bool((headers == headers[0]).all()):
        _refuse(control.gather_objects(list(keys) if takes_part else None))
    if not bool(present.all()):
        keys = next(known for known in control.gather_objects(list(keys) if takes_part else None) if known is not None)
    count = int(headers[0, 0])
    parts = [gathered[:, _HEADER : _HEADER + min(count, room)]]
    if count > room:
        rest = torch.zeros(count - room, dtype=torch.float64)
        if takes_part:
            rest.copy_(payload[room:])
        parts.append(control.all_gather(rest))
    return list(keys), torch.cat(parts, dim=1)[present]


def _refuse(keys_by_rank: list[list[str] | None]) -> None:
    everywhere = [set(keys) for keys in keys_by_rank if keys is not None]
    common = set.intersection(*everywhere)
    odd = sorted(set.union(*everywhere) - common)
    lines = []
    for key in odd[:20]:
        logged = spread([None if keys is None else key in keys for keys in keys_by_rank])
        lines.append(f"{key!r} on rank(s) {logged[True]} and not on {logged[False]}")
    raise DistributedError(
        f"The logged keys differ between ranks: {'; '.join(lines)}.",
        "an epoch's values are reduced over all ranks together.",
        "log the same keys on every rank, or with sync_dist=False where a value is a rank's own.",
    )
