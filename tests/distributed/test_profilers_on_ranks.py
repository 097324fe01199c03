"""Profilers on several ranks and on a device: each rank's file, and no wait for the device (L-05)."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Regression, failing, loader, quiet

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.profilers import SimpleProfiler
from drivetrain.testing import requires_package
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import on_emulated_cuda, on_ranks


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


def fit(root: Path, strategy: str, profiler: Any, **options: Any) -> tuple[Fit, str]:
    """Train and validate; return the Fit and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runner = quiet(default_root_dir=root, strategy=strategy, profiler=profiler, seed=1, **options)
        runner.fit(Validated(), loader(32, 2), loader(32, 2))
    return runner, printed.getvalue()


def calls(profiler: SimpleProfiler) -> dict[str, int]:
    return {" > ".join(row.path): row.calls for row in profiler.rows()}


def _profiled(root: Path, strategy: str) -> Any:
    simple = SimpleProfiler()
    runner, printed = fit(root, strategy, simple)
    adds_up = sum(row.self_ns for row in simple.rows()) == simple.total_ns > 0
    traced = fit(root, strategy, "pytorch")[0]
    (path,) = Path(str(traced.log_dir), "profile").glob(f"fit-pytorch-rank-{traced.global_rank}.trace.json")
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    return printed, str(runner.log_dir), simple.summary(), calls(simple), adds_up, names


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed", marks=requires_package("deepspeed"))])
def test_each_rank_has_a_table_and_a_trace(tmp_path: Path, strategy: str) -> None:  # L-05
    first, second = on_ranks(_profiled, 2, tmp_path, strategy)
    printed, folder, summary, rows, _, _ = first
    assert rows["training > forward"] == rows["training > backward"] == rows["training > optimizer"] == 8
    assert rows["training > windows > data"] == 9
    assert rows["training > validation > forward"] == 8
    assert summary in printed
    assert "rank 0 of 2" in summary
    assert "Profile of" not in second[0]  # rank 0 logs for all ranks
    assert "rank 1 of 2" in second[2]
    files = {path.name: path.read_text() for path in Path(folder, "profile").iterdir()}
    assert files == {"fit-simple-rank-0.txt": summary, "fit-simple-rank-1.txt": second[2]}
    for *_, adds_up, names in (first, second):
        assert adds_up
        assert names.count("forward") == 3
        assert {"backward", "optimizer", "ProfilerStep#2"} <= {*names}


def _on_one_rank(root: Path) -> list[str]:
    first, told = torch.distributed.get_rank() == 0, []
    for profiler, checkpoints, callbacks in (
        ("simple" if first else None, True, []),
        ("simple" if first else None, False, []),
        (None, False, [] if first else [Checkpoint()]),
    ):
        with failing() as caught:
            fit(root, "ddp", profiler, enable_checkpointing=checkpoints, callbacks=callbacks)
        told.append(f"{caught['type']}: {caught['text']}")
    return told


def test_what_one_rank_alone_has_is_refused_by_name(tmp_path: Path) -> None:  # L-05
    # Ranks without loggers or checkpoints do not take part in choosing the run's folder.
    alone = "what needs a folder for the run"
    wanted = (
        ["profiler", "SimpleProfiler"],
        [alone, '"SimpleProfiler" on rank(s) [0]', '"nothing" on rank(s) [1]'],
        [alone, '"Checkpoint" on rank(s) [1]', '"nothing" on rank(s) [0]'],
    )
    for texts in on_ranks(_on_one_rank, 2, tmp_path):
        for text, parts in zip(texts, wanted, strict=True):
            assert text.startswith("DistributedError")
            assert all(part in text for part in parts), text


def _on_a_device(gpu: EmulatedCuda, root: Path) -> tuple[dict[str, int], str, list[int]]:
    profiler, waits = SimpleProfiler(), []
    for one in (None, profiler):
        gpu.forget()
        fit(root, "single_device", one, accelerator="gpu", devices=1)
        waits.append(len(gpu.host_syncs))
    return calls(profiler), profiler.summary(), waits


@requires_emulated_cuda()
def test_on_a_device_no_phase_waits_for_it(tmp_path: Path) -> None:  # L-05
    seen = on_emulated_cuda(_on_a_device, tmp_path)
    found, summary, (without, with_profiler) = seen.returned
    assert without == with_profiler
    assert found["training > transfer"] >= 16
    assert "The host does not wait for cuda:0" in summary
    assert "The host waits for the device in logging, in checkpoints" in summary
    assert not seen.races, seen.report
