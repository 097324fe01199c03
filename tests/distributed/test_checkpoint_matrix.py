"""Checkpoints of runs on ranks: those of any strategy and world size resume under any other (F-01), or wait (Q-05)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_nets import Tied
from safetensors.torch import load_model
from small_runs import TIGHT, Regression, SaveAt, about, global_batches, loader, quiet, seeded, weights
from torch import nn

from averaging import Averaging
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from worlds import on_ranks

SAMPLES, GLOBAL, STOP = 52, 8, 4  # seven steps, the last one short; the run is saved in the middle

STRATEGIES: dict[str, tuple[int, Any]] = {
    "single": (1, SingleDeviceStrategy),
    "ddp 2": (2, lambda: DDPStrategy(find_unused_parameters=True)),
    "averaging 2": (2, Averaging),  # K-01: third-party
    "fsdp 2": (2, FSDPStrategy),
    "fsdp 4": (4, lambda: FSDPStrategy(wrap=[])),
    "hsdp 2x2": (4, lambda: FSDPStrategy(sharding="hybrid", replicate_size=2, wrap=[])),
    "zero 1": (2, lambda: DeepSpeedStrategy(stage=1)),
    "zero 2": (2, lambda: DeepSpeedStrategy(stage=2)),
    "zero 3": (2, lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0)),
}


def _net() -> Tied:
    net = Tied()
    net.temperature = nn.Parameter(torch.ones(1))  # DeepSpeed does not support parameters without a dimension
    return net


class Model(Regression):
    """Has ties, a frozen layer, an unused parameter, a buffer, two groups, and a scheduler in mid-schedule."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(_net)
        self.net.stem.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(()))
        # without weight decay: ZeRO's zero gradients must not change the parameter
        self.unused = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        flat = [one for one in trained if one.dim() < 2]
        rest = [one for one in trained if one.dim() >= 2]
        groups: list[dict[str, Any]] = [{"params": flat, "weight_decay": 0.0}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-5, weight_decay=0.1, fused=True)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _write(ranks: int, folder: Path) -> list[Any]:
    return [_fit(name, ranks, callbacks=SaveAt(STOP, str(folder / name))) for name in _names(ranks)]


def _read(ranks: int, folder: Path) -> dict[tuple[str, str], Any]:
    return {(one, other): _fit(other, ranks, folder / one) for one in STRATEGIES for other in _names(ranks)}


def _fit(name: str, ranks: int, start: Path | None = None, **options: Any) -> Any:
    module = Model()
    trainer = quiet(strategy=STRATEGIES[name][1](), devices=1 if ranks == 1 else "auto", **options)
    trainer.fit(module, loader(SAMPLES, GLOBAL // ranks), ckpt_path=start)
    assert module.net.blocks[2].up.weight is module.net.blocks[0].up.weight  # B-07
    return weights(module), float(module.steps), trainer.global_step, trainer.samples_seen


def _names(ranks: int) -> list[str]:
    return [name for name, (count, _) in STRATEGIES.items() if count == ranks]


@pytest.fixture(scope="module")
def reference() -> Any:
    # Written by hand: programs of the oracle have no parameters that are tied, unused, frozen and scalar at once.
    module = Model()
    (optimizer,), (scheduler,) = module.configure_optimizers()
    for batch in global_batches(SAMPLES, GLOBAL):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
        scheduler["scheduler"].step()
    return module


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Path:
    """A checkpoint of each strategy; the runs that wrote them continued undisturbed."""
    folder = tmp_path_factory.mktemp("matrix")
    runs = _write(1, folder)
    runs += on_ranks(_write, 2, 2, folder, timeout=150)[0]
    runs += on_ranks(_write, 4, 4, folder, timeout=150)[0]
    assert len(runs) == len(STRATEGIES)
    for found, *_ in runs:
        torch.testing.assert_close(found, weights(reference), **TIGHT)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_resumed_under_any_strategy_equals_the_reference(ranks: int, written: Path, reference: Any) -> None:
    # F-01: weights and optimizer state; B-07, B-08
    for run in [_read(1, written)] if ranks == 1 else on_ranks(_read, ranks, ranks, written, timeout=300):
        assert len(run) == len(STRATEGIES) * len(_names(ranks))
        for cell, (found, steps, global_step, seen) in run.items():
            torch.testing.assert_close(found, weights(reference), **TIGHT, msg=about(cell))
            assert (steps, global_step, seen) == (7, 7, SAMPLES), cell


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_weights_open_without_drivetrain(name: str, written: Path) -> None:  # F-10, F-04, F-06
    path = written / name
    assert verify(path) == []
    assert {one.suffix for one in path.iterdir()} <= {".json", ".safetensors"}
    module, expected = nn.Module(), Model()
    module.net = _net()
    module.register_buffer("steps", torch.zeros(()))
    module.unused = nn.Parameter(torch.empty(3))
    load_model(module, path / "model.safetensors")
    checkpoint = load(path)
    assert set(checkpoint.weights()) == set(expected.state_dict())
    for key, value in module.state_dict().items():
        assert torch.equal(value, checkpoint.weights()[key])
    state = checkpoint.optimizer_state()
    frozen = {"net.stem.weight", "net.stem.bias"}
    assert set(state["state"]) - {"unused"} == {key for key, _ in expected.named_parameters()} - frozen - {"unused"}
    for key, values in state["state"].items():
        assert values["exp_avg"].shape == expected.get_parameter(key).shape
        assert float(values["step"]) == STOP


class Logs(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        if self.global_rank == 0:
            self.log("of_rank_0", 1.0, sync_dist=False)


def _saved(folder: str, strategy: str, save_async: bool) -> dict[str, float | None]:
    options: dict[str, Any] = {"every_n_train_steps": 3, "save_top_k": -1, "save_async": save_async}
    checkpoint = Checkpoint(folder, "{step}-{of_rank_0:.0f}", "val_loss", **options)
    settings: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 2}
    batches = loader(16, 2)
    quiet(strategy=strategy, callbacks=checkpoint, **settings).fit(Logs(), batches, batches)
    return {os.path.basename(path): score for path, score in checkpoint.best_k_models.items()}


@pytest.mark.parametrize(("strategy", "save_async"), [("ddp", False), ("fsdp", True)])
def test_a_save_that_monitors_validation_waits_for_it(strategy: str, save_async: bool, tmp_path: Path) -> None:
    first, second = on_ranks(_saved, 2, str(tmp_path), strategy, save_async)
    assert first == second
    assert list(first) == ["step=4-of_rank_0=1", "step=8-of_rank_0=1"]  # S-04: after validations
    assert all(score is not None for score in first.values())
    assert [verify(tmp_path / name) for name in first] == [[]] * len(first)
