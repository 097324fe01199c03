"""Conversion of DeepSpeed's checkpoint folders, without running any of the pickled classes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import CheckpointError, Fit, TrainModule
from drivetrain.checkpoint import convert, load
from drivetrain.testing import requires_package
from worlds import on_ranks

pytestmark = requires_package("deepspeed")


class Net(TrainModule):
    """Has two parameter groups, a frozen parameter, buffers, and sizes that are not divisible."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 5)
        self.last = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.first.bias.requires_grad_(False)

    def training_step(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.last(self.first(batch[0])))
        return (output - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [self.first.weight, self.last.bias]},
            {"params": [self.last.weight, *self.norm.parameters()], "lr": 0.05},
        ]
        return torch.optim.AdamW(groups, lr=0.01)


def engine_in(owner: Any, depth: int = 3) -> Any:
    """Return DeepSpeed's engine, wherever the strategy stores it."""
    if type(owner).__name__ == "DeepSpeedEngine":
        return owner
    inside = vars(owner).values() if depth and hasattr(owner, "__dict__") else ()
    return next((found for one in inside if (found := engine_in(one, depth - 1)) is not None), None)


class Saving(Net):
    folder = ""

    def on_train_epoch_end(self) -> None:
        engine_in(self.trainer.strategy).save_checkpoint(self.folder)


def _save(folder: str, stage: int) -> dict[str, torch.Tensor]:
    module = Saving()
    module.folder = folder
    from drivetrain_strategies.deepspeed import DeepSpeedStrategy

    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    strategy = DeepSpeedStrategy(stage=stage, config={"zero_optimization": zero})
    data = DataLoader(TensorDataset(torch.randn(16, 7)), batch_size=4)
    Fit(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False).fit(
        module, data
    )
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_converted_folder_loads_into_a_module(tmp_path: Path, stage: int) -> None:
    # F-14
    trained = on_ranks(_save, 2, str(tmp_path / "zero"), stage, process_group=None, timeout=150)[0]
    convert(tmp_path / "zero", tmp_path / "c", prefix="module.")  # the engine wraps the module
    module = Net.load_from_checkpoint(tmp_path / "c")
    for name, value in module.state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert load(tmp_path / "c").weights_only
    (step,) = (path for path in (tmp_path / "zero").iterdir() if path.is_dir())
    next(step.glob("*_1_mp_rank_00_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 \*_optim_states.pt exist"):
        convert(tmp_path / "zero", tmp_path / "again")


def test_a_step_name_outside_the_folder_is_refused(tmp_path: Path) -> None:
    # F-04
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "latest").write_text("../other")
    with pytest.raises(CheckpointError, match=r"'\.\./other', which is not a folder in it"):
        convert(tmp_path / "zero", tmp_path / "c")
    assert os.listdir(tmp_path) == ["zero"]
