"""`Fit` run as a function on started ranks, and what it returns. Rows A-02, A-03, G-01, G-07."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import Counting, Regression, data, global_batches, loader, quiet, seeded, train_by_hand, weights
from torch import nn

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.errors import DistributedError


class Model(Regression):
    """Logs, predicts, builds a layer in configure_model, and has every kind of state."""

    steps: torch.Tensor
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = None
        self.mse = torchmetrics.MeanSquaredError()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros(()), persistent=False)
        self.net[1].eval()

    def configure_model(self) -> None:
        if self.head is None:
            self.head = seeded(lambda: nn.Linear(1, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.net(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.own += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mse(self.head(self.net(batch[0])), batch[1])
        self.log("mse", self.mse)
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]


def _launched(launcher: str, **settings: Any) -> Fit:
    return quiet(strategy="ddp", devices=2, launcher=launcher, **settings)


def test_the_caller_gets_everything_back() -> None:
    counting, stopping = Counting(), EarlyStopping("val_loss", patience=100)
    trainer = _launched("forkserver", max_epochs=2, callbacks=[counting, stopping])
    module = Model()
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    trainer.fit(module, loader(64, 4), loader(18, 4))
    assert [parameter.data_ptr() for parameter in module.net.parameters()] == pointers
    reference = Model()
    reference.configure_model()
    losses = []
    for _ in range(2):
        train_by_hand(reference, global_batches(64, 8), step=lambda batch, _: reference.loss(batch))
        with torch.no_grad():
            losses.append(float(reference.loss(data(18).tensors)))
    torch.testing.assert_close(weights(module), weights(reference))
    assert int(module.steps) == int(module.own) == counting.batches == 16
    assert module.training
    assert not module.net[1].training
    metrics = trainer.callback_metrics
    assert {"loss", "loss_step", "loss_epoch", "mse", "val_loss"} <= set(metrics)
    assert [float(metrics[name]) for name in ("val_loss", "mse")] == pytest.approx([losses[1]] * 2, rel=1e-5)
    assert stopping.best_score == pytest.approx(min(losses), rel=1e-5)
    assert (trainer.global_step, trainer.current_epoch, trainer.samples_seen) == (16, 2, 128)
    assert (trainer.state, trainer.world_size, trainer.strategy.name) == ("finished", 2, "ddp")
    assert module.trainer is trainer  # L-10
    (validated,) = trainer.validate(module, loader(18, 4), verbose=False)
    assert validated["val_loss"] == pytest.approx(losses[1], rel=1e-5)
    assert torch.equal(torch.cat(trainer.predict(module, loader(18, 4))), data(18).tensors[0])
    assert trainer.global_step == 16


def test_the_best_checkpoint_is_known_after_a_run_in_other_processes(tmp_path: Path) -> None:
    # L-10: it is found in the run's folder, so that a test without a module uses the best weights
    kept = Checkpoint(monitor="val_loss", mode="min", save_top_k=1)
    trainer = _launched(
        "fork", max_epochs=2, callbacks=[kept], default_root_dir=tmp_path, enable_checkpointing=True, logger="csv"
    )
    module = Model()
    trainer.fit(module, loader(64, 4), loader(18, 4))
    best = min(Path(f"{trainer.log_dir}/checkpoints").glob("epoch=*"))
    assert (kept.dirpath, kept.best_model_path) == (str(best.parent), str(best))
    assert kept.best_model_score is not None
    assert kept.best_model_score <= float(trainer.callback_metrics["val_loss"])
    (validated,) = trainer.validate(dataloaders=loader(18, 4), verbose=False)
    assert validated["val_loss"] == pytest.approx(kept.best_model_score, rel=1e-5)
    assert kept.best_model_path == str(best)
    trainer.max_epochs = 1
    trainer.fit(module, loader(64, 4), loader(18, 4))
    assert kept.dirpath == f"{trainer.log_dir}/checkpoints"


class Failing(Regression):
    """Fails on rank 1, unless it runs again."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 1 and self.fails:
            raise LookupError("no such thing")
        return super().training_step(batch, batch_idx)


def test_a_failed_run_changes_no_weights_and_the_next_one_trains() -> None:  # G-01, G-07
    module = Failing()
    before = weights(module).clone()
    told = "(?s)Rank 1 failed with LookupError: no such thing.*in training_step"
    with pytest.raises(DistributedError, match=told):
        _launched("fork").fit(module, loader(64, 4))
    assert torch.equal(weights(module), before)
    module.fails = False
    _launched("fork").fit(module, loader(64, 4))
    torch.testing.assert_close(weights(module), weights(train_by_hand(Regression(), global_batches(64, 8))))
