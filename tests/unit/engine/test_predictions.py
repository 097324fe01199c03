"""How `predict` stores and returns outputs. Row I-14."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader
from small_modules import tiny


def returning(make: Callable[[Any], Any]) -> Tiny:
    return tiny(predict_step=lambda self, batch, batch_idx: make(batch))


class Found:
    """A user's output class without ``to``."""


class Odd:
    """An output class whose ``to`` has another meaning."""

    def to(self, unit: str) -> Any:
        raise TypeError(f"no unit: {unit}")


def packed(batch: Any) -> Any:
    return torch.nn.utils.rnn.PackedSequence(torch.ones(1000, 2)[:5], torch.tensor([2, 2, 1]))


class Reusing:
    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.zeros(2)
        for value in range(3):
            yield buffer.fill_(value)


def test_an_output_has_its_value_at_the_time_of_return(tmp_path: Path) -> None:  # I-14
    scratch = torch.zeros(2)
    for make in (lambda batch: batch, lambda batch: {"x": [batch.numpy()]}, lambda batch: scratch.copy_(batch)):
        outputs = fit(tmp_path).predict(returning(make), Reusing())
        values = [output["x"][0] if isinstance(output, dict) else output for output in outputs]
        assert [value.tolist() for value in values] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize(("make", "size"), [(lambda batch: torch.ones(1000, 1000)[:, 0], 4000), (packed, 40)])
def test_a_view_does_not_keep_its_base_alive(tmp_path: Path, make: Any, size: int) -> None:  # I-14
    (output,) = fit(tmp_path).predict(returning(make), loader(2))
    tensor = output if isinstance(output, torch.Tensor) else output.data
    assert tensor.untyped_storage().nbytes() == size


def test_objects_of_user_classes_are_returned(tmp_path: Path) -> None:  # I-14
    layer = torch.nn.Linear(2, 1)
    module = returning(lambda batch: (Found(), Odd(), layer, None, "text"))
    ((found, odd, kept, nothing, text),) = fit(tmp_path).predict(module, loader(2))
    assert (type(found), type(odd), nothing, text) == (Found, Odd, None, "text")
    assert kept is layer


def test_without_return_predictions_nothing_is_kept_or_sent_by_started_functions(tmp_path: Path) -> None:  # I-14
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def predict(batch: Any) -> Any:
        output = batch * 2
        outputs.append(weakref.ref(output))
        alive.append(sum(one() is not None for one in outputs))
        return output

    assert fit(tmp_path).predict(returning(predict), loader(8), return_predictions=False) is None
    assert alive == [1, 1, 1, 1]  # only the current output
    not_pickled = returning(lambda batch: lambda: batch)
    runner = fit(tmp_path, strategy="ddp", devices=2, accelerator="cpu", launcher="fork")
    assert runner.predict(not_pickled, loader(8), return_predictions=False) is None
