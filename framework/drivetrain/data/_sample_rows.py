"""Splits the output of a step into the outputs of single samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

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
    if isinstance(layout, dict):
        if _require_type(value, Mapping).keys() != layout.keys():
            raise ValueError(f"the keys {list(value)} differ from those of other batches, {list(layout)}")
        return {key: sample_of(value[key], layout[key], row) for key in layout}
    assert isinstance(layout, list)
    parts = zip(_require_type(value, list | tuple), layout, strict=True)
    return type(value)(sample_of(part, inner, row) for part, inner in parts)


def _has_rows(layout: Layout) -> bool:
    parts = layout.values() if isinstance(layout, dict) else layout if isinstance(layout, list) else ()
    return layout == TENSOR or any(map(_has_rows, parts))


def _require_type(value: Any, expected: Any) -> Any:
    if not isinstance(value, expected):
        raise ValueError(f"a batch has a {type(value).__name__} where other batches have another type")
    return value
