from __future__ import annotations

from typing import Any

import pytest
import torch
from callback_run import Run, Where
from torch import nn

from drivetrain._distributed.control import LocalControl
from drivetrain.callbacks import ModelSummary
from drivetrain.callbacks.model_summary import summarize
from drivetrain.errors import ConfigurationError


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.body[0].requires_grad_(False)


def test_tied_parameters_count_once_and_frozen_ones_are_told_apart() -> None:
    # B-07, B-08
    model = _Model()
    summary = summarize(model)
    assert summary.total == sum(parameter.numel() for parameter in model.parameters()) == 40 + 20 + 8
    assert summary.trainable == 48
    # float32 parameters and statistics, and the int64 count of batches.
    assert summary.size == 4 * (68 + 8) + 8
    rows = {row.name: row for row in summary.rows}
    assert list(rows) == ["embedding", "body", "head"]
    assert rows["head"].total == rows["embedding"].total == 40
    assert rows["head"].notes == "tied to embedding.weight"
    assert rows["embedding"].notes == "tied to head.weight"
    assert (rows["body"].total, rows["body"].trainable, rows["body"].notes) == (28, 8, "")


@pytest.mark.parametrize(
    ("depth", "names"),
    [(0, []), (1, ["embedding", "body", "head"]), (2, ["embedding", "body", "body.0", "body.1", "head"])],
)
def test_it_goes_as_deep_as_told(depth: int, names: list[str]) -> None:
    assert [row.name for row in summarize(_Model(), depth).rows] == names
    assert summarize(_Model(), -1) == summarize(_Model(), 9)


def test_meta_and_lazy_parameters_are_counted_for_what_they_will_take() -> None:
    # D-03
    model = nn.Sequential(nn.Linear(1000, 1000, device="meta", dtype=torch.bfloat16), nn.LazyLinear(3))
    summary = summarize(model)
    assert summary.total == 1_001_000
    assert summary.size == 2 * 1_001_000
    assert [row.notes for row in summary.rows] == ["meta", "lazy"]


def test_a_sharded_parameter_counts_whole() -> None:
    # ZeRO 3 leaves an empty parameter and tells its size beside it.
    model = nn.Linear(4, 4, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_numel = 16
    assert summarize(nn.Sequential(model)).total == 16


def test_the_table_is_printed_once_on_rank_0() -> None:
    model: Any = _Model()
    run: Any = Run()
    ModelSummary().on_fit_start(run, model)
    rule = "-" * 73
    assert run.printed == [
        "Name       Type        Params  Trainable     MB\n"
        f"{rule}\n"
        "embedding  Embedding       40         40  0.000  tied to head.weight\n"
        "body       Sequential      28          8  0.000\n"
        "head       Linear          40         40  0.000  tied to embedding.weight\n"
        f"{rule}\n"
        "68 parameters, 48 trainable, 20 frozen, 0.000 MB with buffers"
    ]
    control = LocalControl()
    control.rank = 1
    other: Any = Run(strategy=Where(control=control))
    ModelSummary().on_fit_start(other, model)
    assert other.printed == []
    ModelSummary(max_depth=0).on_fit_start(other := Run(), model)
    assert other.printed == ["68 parameters, 48 trainable, 20 frozen, 0.000 MB with buffers"]


def test_a_depth_that_makes_no_sense_is_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="max_depth=-2"):
        ModelSummary(max_depth=-2)
    assert ModelSummary(1).state_key != ModelSummary(2).state_key
