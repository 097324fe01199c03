"""Copies of batches, of objects with slots. Row I-11."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drivetrain.data._batch_copies import copy_batch, copy_containers


class Slotted:
    __slots__ = ("__hidden", "empty", "value")

    def __init__(self, value: Any) -> None:
        SLOT.__set__(self, value)
        self.__hidden = value

    @property
    def hidden(self) -> Any:
        return self.__hidden

    def __copy__(self) -> Slotted:
        return type(self)(SLOT.__get__(self))


SLOT = vars(Slotted)["value"]


class ReadOnly(Slotted):
    """Reads by a property what its base keeps in a slot of that name, as Python 3.13's paths do."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        return SLOT.__get__(self)


def test_objects_with_slots_and_paths_are_copied() -> None:  # I-11, O-06
    for kind in (Slotted, ReadOnly):
        batch: Any = kind(torch.zeros(2))
        kept = copy_batch({"one": batch})["one"]
        batch.value.add_(1)
        assert kept.value.tolist() == kept.hidden.tolist() == [0, 0]
        assert not hasattr(kept, "empty")
    assert copy_containers([Path("a") / "b"]) == copy_batch([Path("a/b")]) == [Path("a/b")]
