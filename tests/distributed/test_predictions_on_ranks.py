"""Predictions exchanged between ranks. Row I-14."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from small_runs import Regression, failing, loader, quiet

from drivetrain._loops.outputs import _HostPickler
from worlds import on_ranks


class Found:
    """A user's own object."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Predicting(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        first = batch[0][:, 0]
        return {"tensor": first, "own": Found(first), "local": lambda: first}[self.kind]


def _predicted() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["tensor"] = torch.cat(quiet(strategy="ddp").predict(Predicting("tensor"), loader(18, 4)))
    found["own"] = torch.cat([one.x for one in quiet(strategy="ddp").predict(Predicting("own"), loader(18, 4))])
    found["none"] = quiet(strategy="ddp").predict(Predicting("local"), loader(18, 4), return_predictions=False)
    with failing() as found["local"]:
        quiet(strategy="ddp").predict(Predicting("local"), loader(18, 4))
    return found


def test_predictions_are_gathered_or_stay_on_their_ranks() -> None:  # I-14
    expected = torch.cat([batch[0][:, 0] for batch in loader(18, 4)])
    for found in on_ranks(_predicted, 2, process_group=None):
        assert torch.equal(found["tensor"], expected)
        assert torch.equal(found["own"], expected)
        assert found["none"] is None
        assert found["local"]["type"] == "ConfigurationError", found["local"]
        assert "return_predictions=False" in found["local"]["text"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_in_a_users_object_are_sent_from_the_cpu() -> None:  # I-14
    stream = io.BytesIO()
    _HostPickler(stream).dump([Found(torch.arange(3, device="cuda"))])
    (found,) = pickle.loads(stream.getvalue())
    assert found.x.device.type == "cpu"
    assert found.x.tolist() == [0, 1, 2]
