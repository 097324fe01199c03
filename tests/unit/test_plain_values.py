"""Encoding of the values that ranks exchange. J-06."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from drivetrain._distributed.plain_values import decode, encode
from drivetrain._distributed.shards import Box, Span
from drivetrain.checkpoint._format.manifest import FileRecord, Part
from drivetrain.checkpoint._format.tensor_file import Spec
from drivetrain.checkpoint._format.write_handshake import WriteRequest, WriteResult


class _Named(NamedTuple):
    name: str
    count: int  # type: ignore[assignment]  # a tuple has a method of that name


class _Kind(IntEnum):
    SOME = 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -(2**70),
        0.1,
        math.inf,
        -math.inf,
        "text with \udc80 and \N{SNOWMAN}",
        [],
        (),
        {},
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
    assert math.isnan(decode(encode((math.nan,)))[0])
    values: list[Any] = [_Named("x", 1), _Kind.SOME, MappingProxyType({"a": 1})]
    again = decode(encode(values))
    assert again == [("x", 1), 2, {"a": 1}]
    assert [type(one) for one in again] == [tuple, int, dict]


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", torch.zeros(1), torch.float32])
def test_other_values_are_refused_by_their_type(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        encode({"a": [(value,)]})


def test_a_pickle_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decode|JSON|Expecting"):
        decode(pickle.dumps([1]))


def _sent(plain_values: tuple[Any, ...]) -> Any:
    again = decode(encode(plain_values))
    assert again == plain_values
    return again


def test_messages_of_saving_ranks_are_plain() -> None:
    regions: list[Mapping[str, Any]] = [{"w": Box((0, 2), (3, 4)), "v": None}, {"m": Span(3, 9), "scalar": Box((), ())}]
    state = [Spec("generator", torch.uint8, (5056,)), Spec("half", torch.bfloat16, ())]
    request = WriteRequest("digest", {"folder": "y"}, regions, state, "sha256")
    assert WriteRequest.decode(_sent(request.plain_values())) == request
    result = WriteResult(
        {"model.safetensors": FileRecord(8, "00000000", "ab" * 32)},
        [("weights", Part(None, ("model.safetensors",))), ("rank", Part("rank-0.json", ("a", "b"), "index"))],
    )
    assert WriteResult.decode(_sent(result.plain_values())) == result
