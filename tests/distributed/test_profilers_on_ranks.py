"""Profilers on several ranks and on a device: each rank's file, and no wait for the device (L-05)."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import DistributedError
from drivetrain.profilers import SimpleProfiler
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda, on_ranks

QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "seed": 1,
}


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=2)


def _fit(root: Path, strategy: str, profiler: Any, **options: Any) -> tuple[Fit, str]:
    """Train and validate; returns the Fit and what it printed."""
    said = io.StringIO()
    settings = {"accelerator": "cpu", "strategy": strategy, "profiler": profiler, **QUIET, **options}
    with contextlib.redirect_stdout(said):
        runner = Fit(default_root_dir=root, **settings)
        runner.fit(Net(), _loader(), _loader())
    return runner, said.getvalue()


def _profiled(root: Path, strategy: str) -> tuple[str, str, dict[str, int], bool, list[str]]:
    simple = SimpleProfiler()
    runner, said = _fit(root, strategy, simple)
    rows = {" > ".join(row.path): row.calls for row in simple.rows()}
    adds_up = sum(row.self_ns for row in simple.rows()) == simple.total_ns > 0
    traced = _fit(root, strategy, "pytorch")[0]
    assert runner.log_dir is not None
    assert traced.log_dir is not None
    traced.strategy.barrier() if torch.distributed.is_initialized() else None
    return said, runner.log_dir, rows, adds_up, [runner.profiler.summary(), traced.log_dir]


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "fsdp",
        pytest.param(
            "deepspeed",
            marks=pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
        ),
    ],
)
def test_each_rank_has_a_table_and_a_trace(tmp_path: Path, strategy: str) -> None:
    # L-05
    first, second = on_ranks(_profiled, 2, tmp_path, strategy)
    said, folder, rows, _, (summary, traced) = first
    assert first[3]
    assert second[3]
    assert rows["training > forward"] == rows["training > backward"] == rows["training > optimizer"] == 8
    assert rows["training > windows > data"] == 9
    assert rows["training > validation > forward"] == 8
    assert summary in said
    assert "rank 0 of 2" in summary
    assert "Profile of" not in second[0]  # rank 0 logs for all ranks
    assert "rank 1 of 2" in second[4][0]
    files = {path.name: path.read_text() for path in Path(folder, "profile").iterdir()}
    assert files == {"fit-simple-rank-0.txt": summary, "fit-simple-rank-1.txt": second[4][0]}
    for rank in range(2):
        trace = json.loads(Path(traced, "profile", f"fit-pytorch-rank-{rank}.trace.json").read_text())
        names = [one["name"] for one in trace["traceEvents"]]
        assert names.count("forward") == 3
        assert {"backward", "optimizer", "ProfilerStep#2"} <= {*names}


def _differing(root: Path) -> str:
    rank = torch.distributed.get_rank()
    try:
        _fit(root, "ddp", "simple" if rank == 0 else None, enable_checkpointing=True)
    except DistributedError as error:
        return str(error)
    return ""


def test_a_profiler_on_one_rank_alone_is_refused_by_name(tmp_path: Path) -> None:
    # L-05: every rank has a profile
    for said in on_ranks(_differing, 2, tmp_path):
        assert "profiler" in said
        assert "SimpleProfiler" in said


def _wanting_a_folder(root: Path, what: str) -> str:
    first = torch.distributed.get_rank() == 0
    try:
        if what == "profiler":
            _fit(root, "ddp", "simple" if first else None)
        else:
            _fit(root, "ddp", None, callbacks=[] if first else [Checkpoint()])
    except DistributedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("what", "named"), [("profiler", "SimpleProfiler"), ("callback", "Checkpoint")])
def test_a_folder_that_only_some_ranks_need_is_refused_by_name(tmp_path: Path, what: str, named: str) -> None:
    # L-05: ranks without loggers or checkpoints do not take part in choosing the run's folder
    wants, not_ = (0, 1) if what == "profiler" else (1, 0)
    for said in on_ranks(_wanting_a_folder, 2, tmp_path, what):
        assert "what needs a folder for the run" in said
        assert f'"{named}" on rank(s) [{wants}]' in said
        assert f'"nothing" on rank(s) [{not_}]' in said


def _on_a_device(gpu: EmulatedCuda, root: Path) -> tuple[dict[str, int], str, list[int]]:
    profiler, waits = SimpleProfiler(), []
    for one in (None, profiler):
        gpu.forget()
        _fit(root, "single_device", one, accelerator="gpu", devices=1)
        waits.append(len(gpu.host_syncs))
    return {" > ".join(row.path): row.calls for row in profiler.rows()}, profiler.summary(), waits


@requires_emulated_cuda()
def test_on_a_device_no_phase_waits_for_it(tmp_path: Path) -> None:
    # L-05
    seen = on_emulated_cuda(_on_a_device, tmp_path)
    calls, summary, waits = seen.returned
    assert waits[0] == waits[1]
    assert calls["training > transfer"] >= 16
    assert "The host does not wait for cuda:0" in summary
    assert "The host waits for the device in logging, in checkpoints" in summary
    assert not seen.races, seen.report
