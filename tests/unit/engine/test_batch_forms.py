"""Batches of every supported structure under every precision. Row I-11."""

from __future__ import annotations

import dataclasses
import warnings
from array import array
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit
from torch.nn.utils.rnn import PackedSequence, pack_sequence

# Private: how a None batch passes between ranks, and devices other than the CPU, have no front door here.
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._loops.windows import exchanged_windows
from drivetrain._runtime.transfer import cast_floating, move_to
from drivetrain.data._sharding import BatchShard

CONVERTED = {"32-true": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
CONVERTED |= {"bf16-mixed": torch.float32, "16-mixed": torch.float32}


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    ids: torch.Tensor
    name: str


class Encoding(UserDict[str, Any]):
    """Like a Hugging Face ``BatchEncoding``: has more than its entries, its own constructor and an in-place ``to``."""

    def __init__(self, *, rows: int) -> None:
        super().__init__(x=torch.ones(rows, 2), ids=torch.arange(rows), name="text")
        self.encodings = ["how it came about"]

    def to(self, device: torch.device) -> Encoding:
        assert isinstance(device, str | torch.device | int)
        self.data = {key: value.to(device) if hasattr(value, "to") else value for key, value in self.data.items()}
        return self


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """Like a Hugging Face ``ModelOutput``: each field is also an entry."""

    x: torch.Tensor
    ids: torch.Tensor

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.x, self.ids)


FORMS: dict[str, Callable[[], Any]] = {
    "frozen dataclass": lambda: Frozen(torch.ones(3, 2), torch.arange(3), "text"),
    "encoding": lambda: Encoding(rows=3),
    "model output": lambda: Output(torch.ones(3, 2), torch.arange(3)),
    "packed sequence": lambda: pack_sequence([torch.ones(length, 2) for length in (4, 2, 1)]),
    "among what is no tensor": lambda: [None, "text", Path("a/b"), {"x": torch.ones(3, 2), "ids": torch.arange(3)}],
}


def part(batch: Any, name: str) -> Any:
    """Return the tensor of this name."""
    if isinstance(batch, list):
        return batch[-1][name]
    return getattr(batch, name) if isinstance(batch, Frozen) else batch[name]


class Taking(Tiny):
    """Computes on ``x`` and records its batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch)
        return self.layer(batch.data if isinstance(batch, PackedSequence) else part(batch, "x")).mean()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch


@pytest.mark.parametrize(
    ("form", "precision"),
    [*((form, "16-true") for form in FORMS), *(("frozen dataclass", precision) for precision in CONVERTED)],
)
def test_a_batch_keeps_its_structure_and_gets_the_precisions_dtype(tmp_path: Path, form: str, precision: str) -> None:
    # I-11
    given, module = FORMS[form](), Taking()
    trainer = fit(tmp_path, precision=precision)
    trainer.fit(module, [given])
    assert trainer.samples_seen == 3  # sequences of a packed sequence are counted, rather than time steps
    (came,) = module.seen
    assert type(came) is type(given)
    if isinstance(came, PackedSequence):
        assert came.data.dtype == CONVERTED[precision]
        assert torch.equal(came.batch_sizes, given.batch_sizes)
        return
    assert part(came, "x").dtype == CONVERTED[precision]
    assert part(came, "ids").dtype == torch.int64
    assert part(given, "x").dtype == torch.float32  # the user's own batch is unchanged
    if isinstance(came, Encoding):
        assert came.encodings == given.encodings
        assert came["name"] == "text"
    if isinstance(came, Output):
        assert came.x is came["x"]
    if isinstance(came, list):
        assert came[:3] == [None, "text", Path("a/b")]


@pytest.mark.parametrize("batch", [None, ["text", None, Path("a/b")]])
def test_a_batch_without_tensors_passes(tmp_path: Path, batch: Any) -> None:  # I-11
    class Blind(Taking):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch)
            return self.layer(torch.ones(1, 2)).mean()

        def batch_weight(self, batch: Any) -> int:
            return 1

    module = Blind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it counts as one sample, with a warning
        fit(tmp_path, precision="16-true", accumulate_grad_batches=2).fit(module, [batch] * 3)
        assert fit(tmp_path, precision="16-true").predict(module, [batch]) == [batch]
    assert module.seen == [batch] * 3


def test_none_is_a_batch_on_several_ranks_too() -> None:  # I-11
    shard = BatchShard(1, None, False, 0)
    micro_batches = exchanged_windows(iter([(None, shard)] * 3), 2, LocalControl(), None, None)
    assert [(micro.batch, micro.samples) for micro in micro_batches] == [(None, 1)] * 3


def test_objects_that_are_no_batch_are_not_cast() -> None:  # I-11
    layer, complex_number = torch.nn.Linear(2, 1), torch.tensor([1j])
    cast = cast_floating([layer, complex_number, torch.float32], torch.float16)
    assert cast[0] is layer
    assert layer.weight.dtype == torch.float32
    assert cast[1:] == [complex_number, torch.float32]


def test_an_output_moves_as_a_whole_and_a_buffer_of_numbers_not_at_all() -> None:  # I-11
    moved = move_to(Output(torch.ones(3, 2), torch.arange(3)), torch.device("meta"))
    assert {one.device.type for one in (moved.x, moved.ids, moved["x"], moved["ids"])} == {"meta"}
    numbers, view = array("d", [1.0]), memoryview(b"ab")
    moved = move_to({"numbers": numbers, "views": [view]}, torch.device("cpu"))
    assert moved["numbers"] is numbers
    assert moved["views"][0] is view
