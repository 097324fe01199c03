"""Moving nested collections and counting samples; prefetching needs a GPU."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from drivetrain._runtime.transfer import first_dimension, move_to
from drivetrain.data._prefetcher import Prefetcher
from drivetrain.errors import ConfigurationError

META = torch.device("meta")
Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    rest: list[torch.Tensor]
    late: torch.Tensor = dataclasses.field(init=False)


class Encoding(UserDict[str, Any]):
    """Moves itself, in place, as a Hugging Face BatchEncoding does."""

    def to(self, device: torch.device) -> None:
        self.data = {key: value.to(device) for key, value in self.data.items()}


def tensor() -> torch.Tensor:
    return torch.zeros(3, 2)


def test_collections_keep_their_types() -> None:
    batch = {
        "tuple": (tensor(), [tensor(), "text", 3, None]),
        "point": Point(tensor(), {"deep": tensor()}),
        "ordered": OrderedDict(a=tensor()),
        "default": defaultdict(list, a=[tensor()]),
        "parameter": torch.nn.Parameter(tensor()),
        "packed": pack_sequence([torch.zeros(2)]),
        "range": range(3),
    }
    moved = move_to(batch, META)
    assert moved["tuple"][0].device == moved["tuple"][1][0].device == META
    assert moved["tuple"][1][1:] == ["text", 3, None]
    assert type(moved["point"]) is Point
    assert moved["point"].y["deep"].device == META
    assert type(moved["ordered"]) is OrderedDict
    assert moved["ordered"]["a"].device == META
    assert moved["default"].default_factory is list
    assert moved["default"]["a"][0].device == META
    assert moved["parameter"].device == META
    assert moved["packed"].data.device == META
    assert moved["range"] == range(3)
    # The batch that was given is as it was.
    assert batch["tuple"][0].device.type == "cpu"  # type: ignore[index]


def test_dataclasses_frozen_ones_too() -> None:
    batch = Frozen(tensor(), "name", [tensor()])
    object.__setattr__(batch, "late", tensor())
    moved = move_to(batch, META)
    assert type(moved) is Frozen
    assert {moved.x.device, moved.rest[0].device, moved.late.device} == {META}
    assert moved.name == "name"
    assert batch.x.device.type == "cpu"


def test_objects_move_themselves() -> None:
    moved = move_to([Encoding(ids=tensor())], META)
    assert type(moved[0]) is Encoding
    assert moved[0]["ids"].device == META


def test_what_is_there_already_is_not_copied() -> None:
    x = tensor()
    assert move_to((x,), torch.device("cpu"))[0] is x


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        (["text", {"a": 3, "b": (torch.zeros(4), torch.zeros(9))}], 4),
        (Point(torch.zeros(2), torch.zeros(3)), 2),
        (Frozen(torch.zeros(6), "name", []), 6),
        (Encoding(ids=torch.zeros(7, 1)), 7),
    ],
)
def test_the_first_dimension_of_the_first_tensor_counts(batch: Any, samples: int) -> None:
    assert first_dimension(batch) == samples


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch_weight"):
        first_dimension({"text": ["a", "b"]})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_copy_ahead_brings_every_batch_whole() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    prefetcher = Prefetcher(device)
    batches = [
        {"x": torch.full((1 << 20,), float(value)), "ids": Encoding(a=torch.tensor([value]))} for value in range(20)
    ]
    sums = []
    sent = prefetcher.send(batches[0])
    for following in [*batches[1:], None]:
        batch = prefetcher.receive(sent)
        if following is not None:
            sent = prefetcher.send(following)
        for _ in range(20):
            total = (batch["x"] * 1.0).sum()
        sums.append(total + batch["ids"]["a"].sum())
        del batch
    assert [float(value) for value in sums] == [value * ((1 << 20) + 1.0) for value in range(20)]
