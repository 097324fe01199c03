"""Values that documents restore as equal ones, and values that are rejected by name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_case import equal

from drivetrain import CheckpointError
from drivetrain.checkpoint._format.documents import decode, dumps, encode, loads


def restored(value: Any) -> Any:
    tensors: dict[str, Any] = {}
    text = dumps(encode(value, tensors))
    return decode(loads(text, "it"), tensors.__getitem__)


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -(2**80), 0.1, -0.0, math.inf, -math.inf, "", "naïve \ud800 \x00"),
    *([], (), ((1, [2, ()]), {}), {"a": 1, "b": {"c": (None,)}}, {1: "one", (2, 3): "pair", None: 0, 0.5: "half"}),
    *({"$tuple": [1]}, {"$tensor": "weights"}, {"$pairs": [[1, 2]], "more": 1}, Counter({30: 1, 60: 2})),
    {"tensor": torch.tensor([1.5]), "deep": [(torch.tensor(2),)]},
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_restored_equal(value: Any) -> None:
    assert equal(restored(value), value)


def test_nan_and_subclasses_are_restored_as_equal_values() -> None:
    assert math.isnan(restored({"x": math.nan})["x"])
    value = {"a": numpy.float64(0.1), "b": OrderedDict(x=1), "c": torch.Size([2, 3])}
    assert restored(value) == value


_Pair = namedtuple("_Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", {1, 2}, 1j, torch.float32, Path("x"), numpy.float32(1), _Pair(1, 2)],
    ids=lambda value: type(value).__name__,
)
def test_another_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"'callbacks/Mine/2', a {type(value).__name__}"):
        encode({"callbacks": {"Mine": [0, 1, value]}}, {})
    endless = [value]
    endless[0] = endless
    with pytest.raises(CheckpointError, match="'callbacks': it contains itself"):
        encode({"of": endless}, {}, "callbacks")


def test_documents_have_the_documented_form() -> None:
    """As docs/checkpoint-format.md says, so that other readers can decode them."""
    tensors: dict[str, Any] = {}
    value = {"a": (1, math.inf), "b": {2: None}, "c": Counter({3: 1}), "d/e": torch.ones(1), "d": {"e": torch.zeros(1)}}
    assert encode(value, tensors) == {
        "a": {"$tuple": [1, {"$float": "inf"}]},
        "b": {"$pairs": [[2, None]]},
        "c": {"$counter": [[3, 1]]},
        "d/e": {"$tensor": "d/e"},
        "d": {"e": {"$tensor": "d/e~2"}},
    }
    assert equal(tensors, {"d/e": torch.ones(1), "d/e~2": torch.zeros(1)})
