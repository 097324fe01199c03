"""What a rank reads first of a source, in a form that ranks can compare before they train on it."""

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

from drivetrain._runtime.transfer import row_major

# Of a list of indices; enough to tell two orders apart.
_LOOKED_AT = 4096
_SHOWN = 6

_UNKNOWN: Any = object()


class OrderFingerprint(NamedTuple):
    """What a rank has read first.

    Attributes:
        name: of the sampler, or of what was iterated.
        digest: of the first indices or of the first batch; None where nothing can be told.
        common: every rank goes through the same order and takes its part of it; else each has data of its own.
    """

    name: str
    digest: str | None
    common: bool


def digest_of_indices(indices: Any) -> str:
    """Return a digest of a nested list of sampler's indices, the same wherever they are the same."""
    hashed = hashlib.blake2b(digest_size=8)
    for value in _plain(indices):
        hashed.update(f"{value!r},".encode())
    return hashed.hexdigest()


def digest_of_batch(batch: Any) -> str | None:
    """Return a digest of all that a batch holds: tensors, arrays, texts, paths and numbers.

    None where it holds nothing of the kind, or something else besides, in which batches may differ unseen.
    """
    hashed, came = hashlib.blake2b(digest_size=8), False
    for value in _leaves(batch):
        if value is _UNKNOWN:
            return None
        came = True
        for part in _bytes_of(value):
            hashed.update(part)
    return hashed.hexdigest() if came else None


def subset_fingerprint(dataset: Any) -> list[Any] | None:
    """Return which samples of a data set were chosen, in a few JSON-able values; None where all of it is read."""
    indices = getattr(dataset, "indices", None)  # a subclass may do without
    if isinstance(dataset, Subset) and indices is not None:
        step = -(-len(indices) // _LOOKED_AT) or 1
        seen = [_index(indices[position]) for position in range(0, len(indices), step)]
        more = ["..."] if len(indices) > _SHOWN else []
        return [*seen[:_SHOWN], *more, digest_of_indices(seen), *(subset_fingerprint(dataset.dataset) or [])]
    if isinstance(dataset, ConcatDataset):
        parts = [subset_fingerprint(part) for part in dataset.datasets[:_LOOKED_AT]]
        return None if all(part is None for part in parts) else parts
    return None


def _index(value: Any) -> Any:
    try:
        return operator.index(value)
    except TypeError:
        # Of other objects nothing is known that would be the same elsewhere.
        return str(value) if isinstance(value, str | bytes | float | tuple | Tensor) else type(value).__name__


def _plain(value: Any) -> Iterator[Any]:
    """Yield what tells indices apart, in a form that does not depend on the process."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        yield "["
        for one in value:
            yield from _plain(one)
        yield "]"
    elif isinstance(value, str | bytes | float):
        yield value
    else:
        try:
            yield operator.index(value)
        except TypeError:
            yield type(value).__name__  # nothing else is known of it that would be the same elsewhere


def _leaves(value: Any) -> Iterator[Any]:
    numpy = sys.modules.get("numpy")
    known = (Tensor, str, bytes, int, float, complex, PurePath)
    if isinstance(value, known if numpy is None else (*known, numpy.ndarray, numpy.generic)):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None))
    elif value is not None:
        yield _UNKNOWN


def _bytes_of(value: Any) -> Iterator[Any]:
    """Yield all of a value: of images, say, the first rows may be black everywhere."""
    if isinstance(value, Tensor):
        yield repr((tuple(value.shape), str(value.dtype))).encode()
        try:
            yield row_major(value.detach().cpu()).view(uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError):  # of a layout or a dtype that has no bytes to show
            yield repr(value.detach()).encode()
    elif isinstance(value, str | bytes | int | float | complex | PurePath):
        yield repr(value).encode()
    else:
        yield repr((value.shape, str(value.dtype))).encode()
        yield repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
