"""A run that is killed and resumed continues its runs at wandb and MLflow."""

from __future__ import annotations

import csv
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import DistributedError
from drivetrain.testing import requires_linux, requires_package, run_distributed

sys.path.append(str(Path(__file__).parents[1] / "unit" / "loggers"))
from services import OFFLINE, mlflow_client, mlflow_curve, mlflow_run, wandb_curve

STEPS = 70


class Net(TrainModule):
    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.kill_at = kill_at

    def training_step(self, batch: Any) -> Any:
        loss = (self.layer(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.layer(batch).mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train(folder: Path, kill_at: int) -> str:
    fit = Fit(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=-1,
        val_check_interval=5,
        logger=["csv", "wandb", "mlflow"],
        callbacks=Checkpoint(every_n_train_steps=20),
        log_every_n_steps=1,
        seed=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = torch.rand(20, 3, generator=torch.Generator().manual_seed(1))
    fit.fit(Net(kill_at), DataLoader(data, batch_size=2), DataLoader(data, batch_size=10), ckpt_path="auto")
    return str(fit.log_dir)


@requires_linux()
@requires_package("wandb")
@requires_package("sqlalchemy")
@pytest.mark.slow
def test_a_killed_run_continues_at_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-04
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for kill_at in (58, 63):
        with pytest.raises(DistributedError):
            run_distributed(_train, 1, tmp_path, kill_at, process_group=None, timeout=100, env=OFFLINE)
    [log_dir] = run_distributed(_train, 1, tmp_path, 0, process_group=None, timeout=100, env=OFFLINE)
    folder = Path(log_dir)
    assert folder == tmp_path / "drivetrain_logs" / "version_0"
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 3  # started once, and resumed twice
    assert len(mlflow_client(tmp_path).search_runs(["1"])) == 1
    assert mlflow_run(tmp_path, folder).info.status == "FINISHED"
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    for metric, interval in (("loss", 1), ("val_loss", 5)):
        curve = [(int(row["step"]), float(row[metric])) for row in rows if row[metric]]
        assert [step for step, _ in curve] == list(range(interval, STEPS + 1, interval))
        resumed = wandb_curve(folder, metric)[-1]
        # A validation at the step of the checkpoint comes after the save, and is repeated.
        assert resumed == [point for point in curve if point[0] >= resumed[0][0]]
        assert 60 <= resumed[0][0] <= 60 + interval
        # Steps between the checkpoint and the kill may be there twice, with the same values.
        assert sorted(set(mlflow_curve(tmp_path, folder, metric))) == curve
