"""Optimizer state of tensor subclasses on several ranks (Q-03)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Saver, each, failing, quiet, seeded
from test_checkpoint_files import control
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import TrainModule
from drivetrain._distributed.shards import Box, ParameterShard
from drivetrain._format import StateToSave, prepare_checkpoint, tensor_writer, write_checkpoint
from drivetrain.callbacks import Checkpoint
from drivetrain.testing import requires_package
from drivetrain_strategies import DeepSpeedStrategy, FSDPStrategy
from quantised_optimizer import QuantisedMomentum, WithoutFlatten
from worlds import on_ranks


def on_some_ranks(params: Any) -> Any:
    # A rank that holds 5 of 9 rows (40 elements) has a quantised momentum, and one that holds 4 (32) has a plain one.
    return {"optimizer": QuantisedMomentum(params, smallest=33), "elementwise": True}


def undeclared(params: Any) -> Any:
    # Not declared element-wise, so that its step sees whole parameters and its state stays whole.
    return {"optimizer": QuantisedMomentum(params)}


def eight_bit(params: Any) -> Any:
    return {"optimizer": importlib.import_module("torchao.optim").AdamW8bit(params, lr=0.01), "elementwise": True}


class Module(TrainModule):
    def __init__(self, configure: Callable[[Any], Any], width: int) -> None:
        super().__init__()
        self.uneven, self.even = seeded(lambda: nn.ModuleList([nn.Linear(width, 9), nn.Linear(9, width * 2)]))
        self.configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.even(self.uneven(batch[0]).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return self.configure(self.parameters())


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "single_device",
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(wrap=[nn.Linear]),
    "hybrid": lambda: FSDPStrategy(wrap=[nn.Linear], sharding="hybrid", replicate_size=2, shard_size=1),
    "deepspeed": lambda: DeepSpeedStrategy(stage=2),
}


def fit(strategy: str, configure: Any = on_some_ranks, callback: Any = None, **options: Any) -> dict[str, Any]:
    width = 1024 if configure is eight_bit else 8
    module = Module(configure, width)
    samples = torch.randn(16, width, generator=torch.Generator().manual_seed(3))
    settings = {"max_epochs": 2, "seed": 1, "enable_checkpointing": isinstance(callback, Checkpoint)}
    trainer = quiet(strategy=STRATEGIES[strategy](), callbacks=[] if callback is None else [callback], **settings)
    # torchao compiles its step, which takes minutes.
    with torch.compiler.set_stance("force_eager"), failing() as caught:
        trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=2), **options)
    return {"error": caught["text"], "step": trainer.global_step, "state": module.state_dict()}


def _whole_and_resumed(strategy: str, configure: Any, path: str) -> list[dict[str, Any]]:
    return [fit(strategy, configure, Saver(path)), fit(strategy, configure, ckpt_path=path)]


@pytest.mark.parametrize(
    ("strategy", "configure"),
    [
        ("fsdp", on_some_ranks),
        ("ddp", on_some_ranks),
        ("hybrid", on_some_ranks),
        pytest.param("fsdp", undeclared, id="whole state, B-17"),
        pytest.param("fsdp", eight_bit, marks=requires_package("torchao")),
    ],
)
def test_the_same_ranks_resume_exactly(strategy: str, configure: Any, tmp_path: Path) -> None:  # Q-03, B-17
    for whole, resumed in on_ranks(_whole_and_resumed, 2, strategy, configure, str(tmp_path / "saved"), timeout=300):
        assert (whole["error"], resumed["error"]) == ("", "")
        for name, value in whole["state"].items():
            assert torch.equal(resumed["state"][name], value), name


def _resume_elsewhere(before: str, after: str, path: str) -> list[dict[str, Any]]:
    fit(before, callback=Saver(path))
    return [fit(after, ckpt_path=path), fit(after, ckpt_path=path, allow="optimizer")]


BLOCKS = ["block-wise optimizer state", "even.weight/momentum", 'allow=("optimizer",)', "2 ranks of"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("fsdp", "ddp", BLOCKS),
        ("ddp", "fsdp", BLOCKS),
        ("fsdp", "hybrid", ["belongs to other shards", "even.weight"]),  # whatever is allowed
    ],
)
def test_blocks_are_not_cut_anew(before: str, after: str, told: list[str], tmp_path: Path) -> None:
    for refused, allowed in on_ranks(_resume_elsewhere, 2, before, after, str(tmp_path / "saved"), timeout=120):
        assert all(part in refused["error"] for part in told), refused
        assert (allowed["step"], allowed["error"]) == ((0, refused["error"]) if after == "hybrid" else (8, ""))


def test_blocks_that_replicas_hold_whole_resume_on_one_device(tmp_path: Path) -> None:
    on_ranks(fit, 2, "ddp", on_some_ranks, Saver(str(tmp_path / "saved")), timeout=120)
    resumed = fit("single", ckpt_path=str(tmp_path / "saved"))
    assert (resumed["step"], resumed["error"]) == (4 + 8, "")


@requires_package("deepspeed")
def test_zero_refuses_it_before_the_second_step(tmp_path: Path) -> None:
    for found in on_ranks(fit, 2, "deepspeed", on_some_ranks, Checkpoint(tmp_path), timeout=120):
        assert "'momentum' of QuantisedMomentum is of class Quantised" in found["error"]
        assert found["step"] == 1


class Unreadable(WithoutFlatten):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("cannot be read")


def _save_with_unreadable_part(path: str, failing_rank: int, name: str) -> str:
    """Save in several rounds: rank 0 writes the file of "first" and "second", rank 1 that of "third" and "whole"."""
    plane = control()
    values = torch.arange(256.0).view(64, 4)
    half = Box((32 * plane.rank, 0), (32, 4))
    shards = {key: ParameterShard(values[half.index], (64, 4), half) for key in ("first", "second", "third")}
    tensor_writer.SMALL_BYTES = tensor_writer.CHUNK_BYTES = 200
    staged = prepare_checkpoint(StateToSave({**shards, "whole": values}), plane.rank, plane.world_size)
    if plane.rank == failing_rank:
        tensors = staged.parts[0].tensors
        broken = Unreadable.of(values if name == "whole" else values[half.index])
        tensors[name] = broken if name == "whole" else replace(shards[name], local=broken)
    with failing() as caught:
        write_checkpoint(path, staged, plane)
    plane.barrier()
    return f"{caught['type']}: {caught['text']}"


def test_a_part_that_one_rank_cannot_read_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    parts = [(0, "second"), (1, "second"), (0, "third"), (1, "third"), (1, "whole")]
    cases = [(str(tmp_path / f"{rank} {name}"), rank, name) for rank, name in parts]
    for errors in on_ranks(each, 2, _save_with_unreadable_part, *cases):
        for (path, failing_rank, _), error in zip(cases, errors, strict=True):
            assert error.startswith("CheckpointError")
            assert f"rank {failing_rank}: RuntimeError: cannot be read" in error
            assert not Path(path).exists()
