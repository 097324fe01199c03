"""A checkpoint of two ranks in a store: one rank dies while it is committed. J-04."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.shards import ParameterShard, Span
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import Contents, Sizes, save
from drivetrain.testing import run_distributed
from faulty_store import FaultyStore

URL = "faulty://store/run/c"
SMALL = Sizes(small=64, large=10**9, piece=512)  # so that each rank has a file of weights


def _save(value: float) -> None:
    rank = dist.get_rank()
    control = GroupControl(dist.new_group(backend="gloo"), dist.distributed_c10d._get_default_store(), rank, 2)
    shard = ParameterShard(torch.full((64,), value), torch.Size((128,)), Span(64 * rank, 64 * rank + 64))
    save(URL, Contents({"a": shard, "b": torch.full((64,), value)}, state=value), control, sizes=SMALL)


def _save_and_die(folder: Path, operation: str, after: int) -> None:
    store = FaultyStore(folder).mount()
    _save(1.0)
    if dist.get_rank() == 0:
        store.fail(operation, "*/manifest.json", error=None, after=after, call=lambda: os._exit(9))
    _save(2.0)


@pytest.mark.parametrize(
    ("operation", "after", "values"),
    [
        ("get", 0, {1.0}),  # before it is put
        ("put", 0, {1.0}),
        ("get", 1, {2.0}),  # once it has been sent, but before a response
    ],
)
def test_rank_0_dies_while_the_checkpoint_is_committed(
    tmp_path: Path, operation: str, after: int, values: set[float]
) -> None:
    with pytest.raises(Exception, match=r"Rank 0 ended with exit code 9|rank 0"):
        run_distributed(_save_and_die, 2, tmp_path, operation, after, timeout=60)
    FaultyStore(tmp_path).mount()
    assert verify(URL) == []
    checkpoint: Any = load(URL)
    assert checkpoint.state() in values
    assert len(checkpoint.manifest.weights.tensors) == 2
    for name in ("a", "b"):
        assert set(checkpoint.weights()[name].tolist()) == {checkpoint.state()}
