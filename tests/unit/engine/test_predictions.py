"""How `predict` stores and returns outputs. Row I-14."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import fit, loader

from drivetrain import Callback, TrainModule
from drivetrain._loops.outputs import on_host

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Returning(TrainModule):
    """Returns ``make(batch)``."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make
        self.register_buffer("scratch", torch.zeros(2))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(batch)


class Found:
    """A user's output class without ``to``."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Odd(Found):
    """An output class whose ``to`` has another meaning."""

    def to(self, unit: str) -> Any:
        raise TypeError(f"no unit: {unit}")


class Reusing:
    """Returns the same buffer from every step."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.zeros(2)
        for value in range(3):
            yield buffer.fill_(value)


def test_an_output_has_its_value_at_the_time_of_return(tmp_path: Path) -> None:  # I-14
    module = Returning(lambda batch: module.scratch.add_(1))  # type: ignore[operator]
    assert [output.tolist() for output in fit(tmp_path).predict(module, loader(6))] == [[1, 1], [2, 2], [3, 3]]
    for make in (lambda batch: batch, lambda batch: {"x": [batch.numpy()]}):
        outputs = fit(tmp_path).predict(Returning(make), Reusing())
        values = [output["x"][0] if isinstance(output, dict) else output for output in outputs]
        assert [value.tolist() for value in values] == [[0, 0], [1, 1], [2, 2]]


def test_a_view_does_not_keep_its_base_alive(tmp_path: Path) -> None:  # I-14
    module = Returning(lambda batch: torch.ones(1000, 1000)[:, 0])
    (output,) = fit(tmp_path).predict(module, loader(2))
    assert output.untyped_storage().nbytes() == 4000


def test_objects_of_user_classes_are_returned(tmp_path: Path) -> None:  # I-14
    layer = torch.nn.Linear(2, 1)
    module = Returning(lambda batch: (Found(batch), Odd(batch), layer, None, "text"))
    ((found, odd, kept, nothing, text),) = fit(tmp_path).predict(module, loader(2))
    assert (type(found), type(odd), nothing, text) == (Found, Odd, None, "text")
    assert kept is layer


def test_nothing_is_kept_without_return_predictions(tmp_path: Path) -> None:  # I-14
    came: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Writing(Callback):
        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            came.append(weakref.ref(outputs))
            alive.append(sum(one() is not None for one in came))

    runner = fit(tmp_path, callbacks=[Writing()])
    assert runner.predict(Returning(lambda batch: batch * 2), loader(8), return_predictions=False) is None
    assert alive == [1, 1, 1, 1]  # only the current output


def test_started_functions_return_no_predictions_either(tmp_path: Path) -> None:  # I-14
    # A step's output that cannot be pickled is not sent.
    module = Returning(lambda batch: lambda: batch)
    runner = fit(tmp_path, strategy="ddp", devices=2, accelerator="cpu", launcher="fork")
    assert runner.predict(module, loader(8), return_predictions=False) is None


@CUDA
def test_predictions_leave_the_device_immediately(tmp_path: Path) -> None:  # I-14
    taken: list[int] = []

    class Watching(Callback):
        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            assert outputs["x"].is_cuda
            taken.append(torch.cuda.memory_allocated())

    module = Returning(lambda batch: {"x": batch.new_ones(1 << 20)})
    outputs = fit(tmp_path, accelerator="gpu", devices=1, callbacks=[Watching()]).predict(module, loader(16))
    assert {output["x"].device.type for output in outputs} == {"cpu"}
    assert max(taken) - taken[0] < 2 * (4 << 20)  # eight of them take 32 MiB


def test_a_packed_sequence_does_not_keep_its_base_alive() -> None:  # I-14
    whole = torch.zeros(1000, 2)
    packed = torch.nn.utils.rnn.PackedSequence(whole[:5], torch.tensor([2, 2, 1]))
    kept = on_host({"x": packed}, True)["x"]
    whole.fill_(1)
    assert kept.data.untyped_storage().nbytes() == 5 * 2 * 4
    assert not kept.data.any()
