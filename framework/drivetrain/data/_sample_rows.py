"""What a step returned for a batch, taken apart by samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS, EACH, WHOLE = "rows", "each", "whole"
"""A tensor with a row for each sample; a list or tuple with an entry for each; what belongs to the only sample."""

Layout = str | list[Any] | dict[Any, Any] | None


def layout_of(value: Any, samples: int) -> Layout:
    """Return how ``value``, made of so many samples, falls apart; None where it does not.

    A tensor by its first dimension; a dict by each of its values. A list or tuple of tensors that all do so is taken
    for several outputs, and any other one for an entry of each sample where it has as many.
    """
    if isinstance(value, Tensor):
        found: Layout = ROWS if value.dim() and value.shape[0] == samples else None
    elif isinstance(value, Mapping):
        inner = {key: layout_of(part, samples) for key, part in value.items()}
        found = None if None in inner.values() else inner
    elif isinstance(value, list | tuple):
        parts = [layout_of(part, samples) for part in value]
        found = EACH if len(value) == samples else None
        if parts and None not in parts and any(map(_has_rows, parts)):
            found = parts
    else:
        found = None
    return WHOLE if found is None and samples == 1 else found


def rows_of(value: Any, layout: Layout, rows: Sequence[int]) -> Any:
    """Return ``value`` with these of its samples alone, in the same structure.

    Raises:
        ValueError: it does not fall apart as ``layout`` says.
    """
    if layout == WHOLE:
        return value
    if layout == ROWS:
        return _checked(value, Tensor)[list(rows)]
    if layout == EACH:
        return type(value)(_checked(value, list | tuple)[row] for row in rows)
    return _each_part(value, layout, lambda part, inner: rows_of(part, inner, rows))


def sample_of(value: Any, layout: Layout, row: int) -> Any:
    """Return what ``value`` has of one sample: of a tensor of shape (n, ...) one of shape (...).

    Raises:
        ValueError: it does not fall apart as ``layout`` says.
    """
    if layout == WHOLE:
        return value
    if layout == ROWS:
        return _checked(value, Tensor)[row].clone()
    if layout == EACH:
        return copy.deepcopy(_checked(value, list | tuple)[row])
    return _each_part(value, layout, lambda part, inner: sample_of(part, inner, row))


def joined(values: Sequence[Any], layout: Layout) -> Any:
    """Return several as one: tensors along their first dimension, and lists one after the other.

    Raises:
        ValueError: they do not fall apart as ``layout`` says, or tensors do not fit each other.
    """
    if layout == WHOLE:
        return list(values)
    if layout == ROWS:
        try:
            return torch.cat([_checked(value, Tensor) for value in values])
        except RuntimeError as error:
            raise ValueError(f"tensors of different samples do not fit together: {error}") from error
    if layout == EACH:
        return type(values[0])(one for value in values for one in _checked(value, list | tuple))
    if isinstance(layout, dict):
        return {key: joined([_checked(value, Mapping)[key] for value in values], layout[key]) for key in layout}
    assert isinstance(layout, list)
    columns = zip(*(_checked(value, list | tuple) for value in values), strict=True)
    return type(values[0])(joined(column, inner) for column, inner in zip(columns, layout, strict=True))


def joined_layout(layout: Layout) -> Layout:
    """Return how what `joined` gave falls apart."""
    if isinstance(layout, dict):
        return {key: joined_layout(inner) for key, inner in layout.items()}
    if isinstance(layout, list):
        return [joined_layout(inner) for inner in layout]
    return EACH if layout == WHOLE else layout


def _each_part(value: Any, layout: Layout, take: Any) -> Any:
    if isinstance(layout, dict):
        if _checked(value, Mapping).keys() != layout.keys():
            raise ValueError(f"the keys {list(value)} are not those of other batches, {list(layout)}")
        return {key: take(value[key], layout[key]) for key in layout}
    assert isinstance(layout, list)
    return type(value)(take(part, inner) for part, inner in zip(_checked(value, list | tuple), layout, strict=True))


def _has_rows(layout: Layout) -> bool:
    parts = layout.values() if isinstance(layout, dict) else layout if isinstance(layout, list) else ()
    return layout == ROWS or any(map(_has_rows, parts))


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} stands where other batches have another type")
    return value
