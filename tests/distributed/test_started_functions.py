"""`Fit` run as a function on started ranks, and what it returns. Rows A-02, A-03, G-01, G-02, G-07."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import Counting, Regression, data, global_batches, loader, quiet, train_by_hand, weights
from torch import nn

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.errors import ConfigurationError, DistributedError


class Model(Regression):
    """Logs, predicts, builds a layer in configure_model, and has every kind of state."""

    steps: torch.Tensor
    own: torch.Tensor

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.mse = torchmetrics.MeanSquaredError()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros(()), persistent=False)
        self.net[1].eval()

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "head"):
            with torch.random.fork_rng():
                torch.manual_seed(4)
                self.head = nn.Linear(1, 1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        return nn.functional.mse_loss(self.head(out) if self.late else out, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.own += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mse(self.net(batch[0]), batch[1])
        self.log("mse", self.mse)
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]


def _launched(launcher: str, **settings: Any) -> Fit:
    return quiet(strategy="ddp", devices=2, launcher=launcher, **settings)


@pytest.mark.parametrize("launcher", ["forkserver", "spawn", "fork"])
def test_the_caller_gets_everything_back(launcher: str) -> None:
    environment = dict(os.environ)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    counting, stopping = Counting(), EarlyStopping("val_loss", patience=100)
    trainer = _launched(launcher, max_epochs=2, callbacks=[counting, stopping])
    module = Model()
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    trainer.fit(module, loader(64, 4), loader(18, 4))
    assert dict(os.environ) == environment
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    reference = train_by_hand(Regression(), global_batches(64, 8))
    x, y = data(18).tensors
    with torch.no_grad():
        best = float(nn.functional.mse_loss(reference.net(x), y))
    train_by_hand(reference, global_batches(64, 8))
    torch.testing.assert_close(weights(module), weights(reference))
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    assert int(module.steps) == int(module.own) == 16
    assert module.training
    assert not module.net[1].training
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(reference.net(x), y))
    metrics = trainer.callback_metrics
    assert {"loss", "loss_step", "loss_epoch", "mse", "val_loss"} <= set(metrics)
    assert float(metrics["val_loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["mse"]) == pytest.approx(loss, rel=1e-5)
    assert counting.batches == 16
    assert stopping.best_score == pytest.approx(min(best, loss), rel=1e-5)
    assert (trainer.global_step, trainer.current_epoch, trainer.samples_seen) == (16, 2, 128)
    assert (trainer.state, trainer.world_size, trainer.strategy.name) == ("finished", 2, "ddp")
    assert module.trainer is trainer  # L-10
    if launcher == "forkserver":
        (validated,) = trainer.validate(module, loader(18, 4), verbose=False)
        assert validated["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert torch.equal(torch.cat(trainer.predict(module, loader(18, 4))), x)
        assert trainer.global_step == 16


def test_the_best_checkpoint_is_known_after_a_run_in_other_processes(tmp_path: Path) -> None:
    # L-10: it is found in the run's folder, so that a test without a module uses the best weights
    kept = Checkpoint(monitor="val_loss", mode="min", save_top_k=1)
    trainer = _launched(
        "fork", max_epochs=2, callbacks=[kept], default_root_dir=tmp_path, enable_checkpointing=True, logger="csv"
    )
    module = Model()
    trainer.fit(module, loader(64, 4), loader(18, 4))
    assert kept.dirpath == f"{trainer.log_dir}/checkpoints"
    assert kept.best_model_path.startswith(f"{kept.dirpath}/epoch=0-")
    assert Path(kept.best_model_path).is_dir()
    assert kept.best_model_score is not None
    assert kept.best_model_score < float(trainer.callback_metrics["val_loss"])
    (validated,) = trainer.validate(dataloaders=loader(18, 4), verbose=False)
    assert validated["val_loss"] == pytest.approx(kept.best_model_score, rel=1e-5)
    assert kept.best_model_path.startswith(f"{kept.dirpath}/epoch=0-")
    trainer.max_epochs = 1
    trainer.fit(module, loader(64, 4), loader(18, 4))
    assert kept.dirpath == f"{trainer.log_dir}/checkpoints"


def test_layers_built_in_configure_model_come_back_too() -> None:
    module = Model(late=True)
    _launched("forkserver").fit(module, loader(64, 4))
    reference = Model(late=True)
    reference.configure_model()
    train_by_hand(reference, global_batches(64, 8), step=lambda batch, _: reference.loss(batch))
    torch.testing.assert_close(weights(module), weights(reference))


class Failing(Regression):
    """Fails on some ranks."""

    def __init__(self, how: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.ranks = ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank in self.ranks:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exits":
                os._exit(7)
            raise LookupError(f"no such thing on {self.how}")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("how", "ranks", "kind", "told"),
    [
        ("one rank", (1,), DistributedError, "Rank 1 failed with LookupError: no such thing on one rank"),
        ("every rank", (0, 1), LookupError, "no such thing on every rank"),
        ("killed", (1,), DistributedError, "Rank 1 was killed by SIGKILL"),
        ("exits", (0,), DistributedError, "Rank 0 ended with exit code 7"),
    ],
)
def test_a_failure_reaches_the_caller(how: str, ranks: tuple[int, ...], kind: type[Exception], told: str) -> None:
    # G-01, G-02, G-07
    module = Failing(how, ranks)
    before = weights(module).clone()
    began = time.monotonic()
    launcher = "forkserver" if how == "one rank" else "fork"  # fork is the fastest start method
    with pytest.raises(kind, match=told) as caught:
        _launched(launcher).fit(module, loader(64, 4))
    assert time.monotonic() - began < 50  # less than the group's timeout of a minute
    if how == "one rank":
        assert "in training_step" in str(caught.value)
    assert torch.equal(weights(module), before)
    module.ranks = ()
    _launched("fork").fit(module, loader(64, 4))
    torch.testing.assert_close(weights(module), weights(train_by_hand(Regression(), global_batches(64, 8))))


def test_unpicklable_objects_are_named(tmp_path: Path) -> None:  # G-06
    module = Model()
    module.loss_of = lambda: None  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="module"):
        _launched("forkserver", default_root_dir=tmp_path).fit(module, loader(64, 4))
