"""Secrets on several ranks: left out by all, reported by one (J-11)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from small_runs import quiet

from captured_warnings import captured_warnings
from drivetrain import TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.loggers import CSVLogger
from worlds import on_ranks

SECRET = "sk-very-secret"


class Fetching(TrainModule):
    def __init__(self, api_token: str, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any) -> Any:
        return self.layer(batch).square().mean()

    def on_train_epoch_end(self) -> None:
        logging.getLogger("drivetrain").warning("so that there is a log of each rank")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _train(folder: Path) -> tuple[int, str]:
    with captured_warnings() as lines:
        saver, logger = Checkpoint(folder / "c", digest="sha256"), CSVLogger(folder / "logs", version=0)
        fit = quiet(strategy="fsdp", seed=0, callbacks=saver, logger=logger, enable_checkpointing=True)
        data: Any = torch.ones(8, 3)  # a tensor is also a dataset
        fit.fit(Fetching(SECRET, 3), torch.utils.data.DataLoader(data, batch_size=2))
    return sum("api_token" in line for line in lines), "\n".join(lines)


def test_one_rank_reports_what_all_leave_out(tmp_path: Path) -> None:
    told_by = on_ranks(_train, 2, tmp_path)
    assert [count for count, _ in told_by] == [1, 0]
    assert SECRET not in "".join(text for _, text in told_by)
    (path,) = (path for path in (tmp_path / "c").iterdir() if path.is_dir())
    assert load(path).hyper_parameters == {"width": 3}
    assert verify(path, digest="sha256") == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"rank-0.log", "rank-1.log", "hparams.json", "manifest.json"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
