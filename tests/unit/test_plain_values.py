"""Encoding of the values that ranks exchange. J-06."""

from __future__ import annotations

import math
import pickle
import signal
from collections import namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch

# The form of messages between ranks has no public name, and a wrong value in one of them is hard to trace from a run.
from drivetrain._distributed.plain_values import decode, encode

Named = namedtuple("Named", ["name", "number"])


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(2**70), 0.1, math.inf, -math.inf, "text with \udc80 and \N{SNOWMAN}", [], (), {}),
        [1, [2.5, None], (3, (4, "x"))],
        {"a": (1, 2), "b": {"c": [()]}},
        {0: "a", (1, 2): {"b": (3,)}, "c": None},
        {"$tuple": [1]},
        {"$pairs": [[1, 2]], "x": 1},
        [{"$tuple": [1]}, ({"$x": (1,)},)],
    ],
)
def test_a_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    again = decode(encode(value))
    assert repr(again) == repr(value)
    assert again == value


def test_nan_is_kept_and_subclasses_become_plain() -> None:
    values: list[Any] = [math.nan, Named("x", 1), signal.SIGINT, MappingProxyType({"a": 1})]
    nan, *again = decode(encode(values))
    assert math.isnan(nan)
    assert again == [("x", 1), 2, {"a": 1}]
    assert [type(value) for value in again] == [tuple, int, dict]


def test_other_values_and_pickles_are_refused() -> None:  # J-06
    for value in ({1, 2}, object(), b"bytes", torch.zeros(1), torch.float32):
        with pytest.raises(TypeError, match=type(value).__name__):
            encode({"a": [(value,)]})
    with pytest.raises(ValueError, match=r"decode|JSON|Expecting"):
        decode(pickle.dumps([1]))
