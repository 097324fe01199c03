"""Fingerprints of what each rank reads first. Ranks compare them before they train."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from torch import Tensor, uint8
from torch.utils.data import ConcatDataset, Subset

from drivetrain._distributed.control_plane import digest_of
from drivetrain._runtime.transfer import row_major

# Maximum number of indices of a list that are hashed, which is enough to distinguish two orders.
_MAX_HASHED = 4096
# Maximum number of indices of a `Subset` that its fingerprint lists.
_MAX_LISTED = 6

_UNKNOWN: Any = object()


class OrderFingerprint(NamedTuple):
    """The fingerprint of what a rank read first.

    Attributes:
        name: the class name of the sampler or of the iterable.
        digest: the digest of the first indices or of the first batch; None if it cannot be computed.
        common: whether every rank iterates the same order and takes its part, so that digests must be equal. Otherwise
            each rank reads its own data, and digests should differ.
    """

    name: str
    digest: str | None
    common: bool


def digest_of_indices(indices: Any) -> str:
    """Return a digest of a sampler's indices, a nested list. Equal indices have equal digests in all processes."""
    return digest_of(_index_to_json(indices))


def digest_of_batch(batch: Any) -> str | None:
    """Return a digest of a batch's tensors, arrays, texts, paths and numbers.

    Returns:
        None if the batch holds none of these, or if it also holds other objects, whose differences the digest would not
        show.
    """
    hasher, has_value = hashlib.blake2b(digest_size=8), False
    for value in _leaves(batch):
        if value is _UNKNOWN:
            return None
        has_value = True
        for part in _bytes_of(value):
            hasher.update(part)
    return hasher.hexdigest() if has_value else None


def subset_fingerprint(dataset: Any) -> list[Any] | None:
    """Return a short JSON-able description of the samples that a `Subset` selects; None if all samples are read."""
    indices = getattr(dataset, "indices", None)  # A subclass may have no indices.
    if isinstance(dataset, Subset) and indices is not None:
        step = -(-len(indices) // _MAX_HASHED) or 1
        sampled = [_index_to_json(indices[position]) for position in range(0, len(indices), step)]
        ellipsis = ["..."] if len(indices) > _MAX_LISTED else []
        return [
            *sampled[:_MAX_LISTED],
            *ellipsis,
            digest_of_indices(sampled),
            *(subset_fingerprint(dataset.dataset) or []),
        ]
    if isinstance(dataset, ConcatDataset):
        parts = [subset_fingerprint(part) for part in dataset.datasets[:_MAX_HASHED]]
        return None if all(part is None for part in parts) else parts
    return None


def _index_to_json(value: Any) -> Any:
    """Return an index, or a nested list of indices, in a form that does not depend on the process."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_index_to_json(item) for item in value]
    if isinstance(value, str | float):
        return value
    try:
        return operator.index(value)
    except TypeError:
        # The repr of other objects may differ between processes.
        return str(value) if isinstance(value, bytes) else type(value).__name__


def _leaves(value: Any) -> Iterator[Any]:
    numpy = sys.modules.get("numpy")
    known = (Tensor, str, bytes, int, float, complex, PurePath)
    if isinstance(value, known if numpy is None else (*known, numpy.ndarray, numpy.generic)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None))
    elif value is not None:
        yield _UNKNOWN


def _bytes_of(value: Any) -> Iterator[Any]:
    """Yield the bytes of a value. All bytes are needed, because images may have equal first rows."""
    if isinstance(value, Tensor):
        yield repr((tuple(value.shape), str(value.dtype))).encode()
        try:
            yield row_major(value.detach().cpu()).view(uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError):  # The layout or dtype has no view as bytes.
            yield repr(value.detach()).encode()
    elif isinstance(value, str | bytes | int | float | complex | PurePath):
        yield repr(value).encode()
    else:
        yield repr((value.shape, str(value.dtype))).encode()
        yield repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
