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


def through(value: Any) -> Any:
    aside: dict[str, Any] = {}
    text = dumps(encode(value, aside))
    return decode(loads(text, "it"), aside.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**80),
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        "",
        "naïve \ud800 \x00",
        [],
        (),
        ((1, [2, ()]), {}),
        {"a": 1, "b": {"c": (None,)}},
        {1: "one", (2, 3): "pair", None: 0, 0.5: "half"},
        {"$tuple": [1]},
        {"$tensor": "weights"},
        {"$pairs": [[1, 2]], "more": 1},
        Counter({30: 1, 60: 2}),
        {"tensor": torch.tensor([1.5]), "deep": [(torch.tensor(2),)]},
    ],
    ids=repr,
)
def test_a_value_is_restored_equal(value: Any) -> None:
    assert equal(through(value), value)


def test_nan_and_subclasses_are_restored_as_equal_values() -> None:
    assert math.isnan(through({"x": math.nan})["x"])
    value = {"a": numpy.float64(0.1), "b": OrderedDict(x=1), "c": torch.Size([2, 3])}
    assert through(value) == value


_Pair = namedtuple("_Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", {1, 2}, 1j, torch.float32, Path("x"), numpy.float32(1), _Pair(1, 2)],
    ids=lambda value: type(value).__name__,
)
def test_another_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"'callbacks/Mine/2', a {type(value).__name__}"):
        encode({"callbacks": {"Mine": [0, 1, value]}}, {})


def test_a_value_that_contains_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["self"] = value
    with pytest.raises(CheckpointError, match="it contains itself"):
        encode(value, {}, "callbacks")


def test_equal_names_of_tensors_are_made_distinct() -> None:
    aside: dict[str, Any] = {}
    encode({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, aside)
    assert list(aside) == ["a/b", "a/b~2"]


def test_documents_have_the_documented_form() -> None:
    """As docs/checkpoint-format.md says, so that other readers can decode them."""
    aside: dict[str, Any] = {}
    value = {"a": (1, math.inf), "b": {2: None}, "c": Counter({3: 1}), "d": torch.ones(1)}
    assert encode(value, aside) == {
        "a": {"$tuple": [1, {"$float": "inf"}]},
        "b": {"$pairs": [[2, None]]},
        "c": {"$counter": [[3, 1]]},
        "d": {"$tensor": "d"},
    }
    assert torch.equal(aside["d"], torch.ones(1))
