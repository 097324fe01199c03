"""State and parameters on a drive, at stage 3: row E-05, if libaio can be built."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEATURES, SHARD_EVERYTHING, Regression, Saver, loader, seeded, trained
from torch import nn
from torch.utils.cpp_extension import _get_build_directory

from drivetrain import Callback
from drivetrain._distributed.shards import ParameterShard
from drivetrain.checkpoint import load
from drivetrain.testing import assert_close_states
from drivetrain_strategies import DeepSpeedStrategy
from drivetrain_strategies.deepspeed._library import import_library
from worlds import on_ranks

WIDTH = 1100
"""So wide that a rank's part of a matrix takes more than a MiB in bf16, too: less than that stays in memory."""

NO_ROOM = {"zero_optimization": {"offload_param": {"max_in_cpu": 0}}}
OFFLOADS: dict[str, dict[str, Any]] = {
    "host": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "optimizer": {"offload_optimizer": "nvme"},
    "both": {"offload_optimizer": "nvme", "offload_parameters": "nvme", "config": NO_ROOM},
}


@cache
def _why_not() -> str:
    """Return why nothing can be offloaded to a drive here, or "". The operator must be compiled already, which takes
    minutes.
    """
    missing = [command for command in ("g++", "ninja") if shutil.which(command) is None]
    import_library()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not missing and not AsyncIOBuilder().is_compatible():
        missing = ["libaio"]
    if missing:
        return f"DeepSpeed's offload to a drive needs {', '.join(missing)}"
    if not Path(_get_build_directory("async_io", False), "async_io.so").exists():
        build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
        return f"DeepSpeed's offload to a drive is not compiled; compile it (some minutes) with python -c '{build}'"
    return ""


class Wide(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(
            lambda: nn.Sequential(
                nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH - 3), nn.Tanh(), nn.Linear(WIDTH - 3, 1)
            )
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)


class Look(Callback):
    """Records at the end what is in memory, and what is available by name."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        flats = {fragment.flat_index: fragment.flat.numel() for fragment in strategy._run.zero.fragments()}
        self.report["in memory"] = [one.ds_tensor.numel() for one in module.parameters()], list(flats.values())
        self.report["weights"] = {name: _whole(value) for name, value in strategy.model_state().items()}
        self.report["moments"] = {
            f"{name}.{key}": _whole(value)
            for name, values in strategy.optimizer_state()["state"].items()
            for key, value in values.items()
        }
        with strategy.gathered(module.net[2].weight, write=False):
            assert torch.equal(module.net[2].weight, self.report["weights"]["net.2.weight"])


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ParameterShard) else value


def _run(name: str, folder: str, precision: str, ckpt_path: str | None = None) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(**SHARD_EVERYTHING, sub_group_size=300_000, nvme_path=folder, **OFFLOADS[name])
    look = Look()
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    settings |= {"precision": precision, "callbacks": [look, Saver(f"{folder}/{name} {precision}")]}
    after = trained(Wide(), loader(24, 4), ckpt_path=ckpt_path, strategy=strategy, **settings)
    return {**look.report, "module": after}


def _runs(folder: str) -> dict[str, Any]:
    found = {f"{name} 32-true": _run(name, folder, "32-true") for name in OFFLOADS}
    found |= {f"{name} bf16-mixed": _run(name, folder, "bf16-mixed") for name in ("host", "both")}
    for source, target in (("host", "both"), ("both", "host")):
        path = f"{folder}/{source} 32-true"
        found[f"{source} to {target} 32-true"] = _run(target, folder, "32-true", path)
    return found


def test_offload_to_a_drive_changes_no_number(tmp_path: Path) -> None:
    # E-05, E-08: weights, moments and checkpoints by name, in both directions, as with the host's memory
    if reason := _why_not():
        pytest.skip(reason)
    numels = [one.numel() for one in Wide().parameters()]
    for found in on_ranks(_runs, 2, str(tmp_path), timeout=150):
        for name, report in found.items():
            expected = found[f"host {name.rpartition(' ')[2]}"]
            assert torch.equal(report["module"], expected["module"]), name
            assert_close_states(report["weights"], expected["weights"], atol=0, rtol=0)
            assert_close_states(report["moments"], expected["moments"], atol=0, rtol=0)
            # Large values are not in memory, which is the purpose of the offload.
            parameters, flats = report["in memory"]
            assert (max(parameters) < max(numels) / 4) == ("both" in name.split()[-2]), name
            assert (0 in flats) == ("host" not in name.split()[-2]), name
            assert any(flats)
    by_host, by_drive = (load(tmp_path / f"{name} 32-true") for name in ("host", "both"))
    assert_close_states(dict(by_drive.weights()), dict(by_host.weights()), atol=0, rtol=0)
