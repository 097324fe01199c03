"""Steps that overwrite the previous step's outputs, as CUDA graphs do (mode="reduce-overhead")."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression

from drivetrain.callbacks import LossSpikeGuard, NonFiniteGuard
from drivetrain.loggers import CSVLogger

_outputs = torch.zeros(())  # overwritten by every replay


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return _outputs.copy_(value).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Net(Regression):
    def __init__(self, replays: bool = True) -> None:
        super().__init__(lr=0.1)
        self.replays = replays

    def output(self, value: torch.Tensor) -> torch.Tensor:
        replayed: torch.Tensor = _Replayed.apply(value) if self.replays else value
        return replayed

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.output(self.layer(batch[0]).square().mean())
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.output(self.layer(batch[0]).mean()))
        self.output(torch.tensor(float("nan")))  # another output in the same memory

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.output(self.layer(batch[0]).sum())


class NeverFinite(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output(self.layer(batch[0]).mean() * float("inf"))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.output(torch.tensor(1.0))


def _run(folder: Path, replays: bool) -> tuple[list[dict[str, str]], list[float]]:
    loader = regression(40)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 2, "val_check_interval": 5}
    guards = [LossSpikeGuard(every_n_steps=3), NonFiniteGuard(every_n_steps=3)]
    trainer = fit(folder, logger=CSVLogger(folder), callbacks=guards, seed=None, **options)
    module = Net(replays)
    trainer.fit(module, loader, loader)
    with (Path(str(trainer.log_dir)) / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    predictions: Any = trainer.predict(module, loader)
    return table, [float(one) for one in predictions]


def test_logged_and_predicted_values_are_those_of_their_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # O-04
    replayed, plain = _run(tmp_path / "replayed", replays=True), _run(tmp_path / "plain", replays=False)
    assert replayed == plain
    assert len({row["loss_step"] for row in plain[0] if row["loss_step"]}) >= 5
    assert len(set(plain[1])) == 10
    assert "the module no longer learns" not in caplog.text


def test_a_never_finite_loss_is_reported_although_validation_overwrote_it(tmp_path: Path, caplog: Any) -> None:
    fit(tmp_path).fit(NeverFinite(), regression(8), regression(8))
    assert "the module no longer learns" in caplog.text
