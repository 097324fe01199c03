"""Moving and copying nested collections and counting their samples. Row I-11."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from drivetrain._data.batch_copies import copy_batch, copy_containers
from drivetrain._runtime.transfer import first_dimension, move_to
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError

META = torch.device("meta")
Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    rest: list[torch.Tensor]
    late: torch.Tensor = dataclasses.field(init=False)


def tensor() -> torch.Tensor:
    return torch.zeros(3, 2)


def test_collections_keep_their_types() -> None:
    frozen = Frozen(tensor(), "name", [tensor()])
    object.__setattr__(frozen, "late", tensor())
    batch: dict[str, Any] = {
        "tuple": (tensor(), [tensor(), "text", 3, None]),
        "point": Point(tensor(), {"deep": tensor()}),
        "ordered": OrderedDict(a=tensor()),
        "default": defaultdict(list, a=[tensor()]),
        "parameter": torch.nn.Parameter(tensor()),
        "packed": pack_sequence([torch.zeros(2)]),
        "range": range(3),
        "frozen": frozen,
    }
    moved = move_to(batch, META)
    for name in batch.keys() - {"parameter"}:
        assert type(moved[name]) is type(batch[name]), name
    tensors = [moved["tuple"][0], moved["tuple"][1][0], moved["point"].y["deep"], moved["ordered"]["a"]]
    tensors += [moved["default"]["a"][0], moved["parameter"], moved["packed"].data]
    tensors += [moved["frozen"].x, moved["frozen"].rest[0], moved["frozen"].late]
    assert {value.device for value in tensors} == {META}
    assert moved["tuple"][1][1:] == ["text", 3, None]
    assert moved["default"].default_factory is list
    assert (moved["frozen"].name, moved["range"]) == ("name", range(3))
    # The given batch is unchanged, and what is on the device is not copied.
    assert frozen.x.device.type == batch["tuple"][0].device.type == "cpu"
    assert move_to((frozen.x,), torch.device("cpu"))[0] is frozen.x


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        (["text", {"a": 3, "b": (torch.zeros(4), torch.zeros(9))}], 4),
        (Point(torch.zeros(2), torch.zeros(3)), 2),
        (Frozen(torch.zeros(6), "name", []), 6),
    ],
)
def test_the_first_dimension_of_the_first_tensor_is_the_number_of_samples(batch: Any, samples: int) -> None:
    assert first_dimension(batch) == samples
    with pytest.raises(ConfigurationError, match="batch_weight"):
        first_dimension({"text": ["a", "b"]})


class Slotted:
    __slots__ = ("__hidden", "empty", "value")

    def __init__(self, value: Any) -> None:
        VALUE.__set__(self, value)
        self.__hidden = value

    @property
    def hidden(self) -> Any:
        return self.__hidden

    def __copy__(self) -> Slotted:
        return type(self)(VALUE.__get__(self))


VALUE = vars(Slotted)["value"]


class ReadOnly(Slotted):
    """Reads by a property what its base keeps in a slot of that name, as Python 3.13's paths do."""

    __slots__ = ()
    value = property(VALUE.__get__)


def test_objects_with_slots_and_paths_are_copied() -> None:  # I-11, O-06
    for kind in (Slotted, ReadOnly):
        batch: Any = kind(torch.zeros(2))
        kept = copy_batch({"one": batch})["one"]
        batch.value.add_(1)
        assert kept.value.tolist() == kept.hidden.tolist() == [0, 0]
        assert not hasattr(kept, "empty")
    assert copy_containers([Path("a") / "b"]) == copy_batch([Path("a/b")]) == [Path("a/b")]


def test_defaults_of_a_data_module() -> None:
    data = DataModule()
    assert (data.hparams, data.state_dict()) == ({}, {})
    assert data.transfer_batch_to_device([tensor()], META, 0)[0].device == META
    for stage in ("train", "val", "test", "predict"):
        with pytest.raises(NotImplementedError):
            getattr(data, f"{stage}_dataloader")()
    with pytest.raises(AttributeError, match="no attribute 'trainr'"):
        _ = data.trainr  # type: ignore[attr-defined]
