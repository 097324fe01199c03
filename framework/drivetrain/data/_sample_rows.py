"""Splits the output of a step into the outputs of single samples, and concatenates outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TENSOR, LIST, WHOLE = "rows", "each", "whole"
"""Layouts of a tensor with a row per sample, a list or tuple with an entry per sample, and any value for one sample."""

Layout = str | list[Any] | dict[Any, Any] | None


def layout_of(value: Any, samples: int) -> Layout:
    """Return how ``value``, the output for ``samples`` samples, is split by sample; None if it cannot be split.

    A tensor is split along its first dimension, and a dict by splitting its values. A list or tuple that contains
    splittable tensors counts as several outputs; any other list or tuple needs an entry per sample.
    """
    if isinstance(value, Tensor):
        layout: Layout = TENSOR if value.dim() and value.shape[0] == samples else None
    elif isinstance(value, Mapping):
        inner = {key: layout_of(part, samples) for key, part in value.items()}
        layout = None if None in inner.values() else inner
    elif isinstance(value, list | tuple):
        parts = [layout_of(part, samples) for part in value]
        layout = LIST if len(value) == samples else None
        if parts and None not in parts and any(map(_has_rows, parts)):
            layout = parts
    else:
        layout = None
    return WHOLE if layout is None and samples == 1 else layout


def rows_of(value: Any, layout: Layout, rows: Sequence[int]) -> Any:
    """Return the given samples of ``value``, in the same structure.

    Raises:
        ValueError: the value does not match ``layout``.
    """
    if layout == TENSOR:
        return _require_type(value, Tensor)[list(rows)]
    if layout == LIST:
        return type(value)(_require_type(value, list | tuple)[row] for row in rows)
    return _map_parts(value, layout, lambda part, inner: rows_of(part, inner, rows))


def sample_of(value: Any, layout: Layout, row: int) -> Any:
    """Return one sample of ``value``; for a tensor of shape (n, ...), a copy of a row of shape (...).

    Raises:
        ValueError: the value does not match ``layout``.
    """
    if layout == WHOLE:
        return value
    if layout == TENSOR:
        return _require_type(value, Tensor)[row].clone()
    if layout == LIST:
        return copy.deepcopy(_require_type(value, list | tuple)[row])
    return _map_parts(value, layout, lambda part, inner: sample_of(part, inner, row))


def concatenate(values: Sequence[Any], layout: Layout) -> Any:
    """Concatenate several outputs: tensors along their first dimension, and lists.

    Raises:
        ValueError: an output does not match ``layout``, or tensors have incompatible shapes.
    """
    if layout == WHOLE:
        return list(values)
    if layout == TENSOR:
        try:
            return torch.cat([_require_type(value, Tensor) for value in values])
        except RuntimeError as error:
            raise ValueError(f"tensors of different batches cannot be concatenated: {error}") from error
    if layout == LIST:
        return type(values[0])(item for value in values for item in _require_type(value, list | tuple))
    if isinstance(layout, dict):
        return {
            key: concatenate([_require_type(value, Mapping)[key] for value in values], layout[key]) for key in layout
        }
    assert isinstance(layout, list)
    columns = zip(*(_require_type(value, list | tuple) for value in values), strict=True)
    return type(values[0])(concatenate(column, inner) for column, inner in zip(columns, layout, strict=True))


def concatenated_layout(layout: Layout) -> Layout:
    """Return the layout of the result of `concatenate` for outputs with this layout."""
    if isinstance(layout, dict):
        return {key: concatenated_layout(inner) for key, inner in layout.items()}
    if isinstance(layout, list):
        return [concatenated_layout(inner) for inner in layout]
    return LIST if layout == WHOLE else layout


def _map_parts(value: Any, layout: Layout, function: Any) -> Any:
    if isinstance(layout, dict):
        if _require_type(value, Mapping).keys() != layout.keys():
            raise ValueError(f"the keys {list(value)} differ from those of other batches, {list(layout)}")
        return {key: function(value[key], layout[key]) for key in layout}
    assert isinstance(layout, list)
    return type(value)(
        function(part, inner) for part, inner in zip(_require_type(value, list | tuple), layout, strict=True)
    )


def _has_rows(layout: Layout) -> bool:
    parts = layout.values() if isinstance(layout, dict) else layout if isinstance(layout, list) else ()
    return layout == TENSOR or any(map(_has_rows, parts))


def _require_type(value: Any, expected: Any) -> Any:
    if not isinstance(value, expected):
        raise ValueError(f"a batch has a {type(value).__name__} where other batches have another type")
    return value
