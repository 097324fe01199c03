"""A run in processes that were started for it, and what the caller gets back. Rows A-02, A-03, G-01, G-07, I-15."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import FEATURES, TIGHTER, Counting, Regression, data, loader, quiet, seeded, train_by_hand, weights
from test_own_mistakes import Buggy
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain_strategies import FSDPStrategy
from oracle.check import check
from oracle.program import Net, Program

SAMPLES = 32


class Late(Regression):
    """Builds everything in `configure_model`; `__init__` only sets placeholders. Logs, and has every kind of state."""

    table: torch.Tensor
    own: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.net: Any = None
        self.act: Any = None
        self.scale: Any = None
        self.names: Any = None
        self.mse = torchmetrics.MeanSquaredError()
        self.register_buffer("table", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def configure_model(self) -> None:
        if self.net is None:
            self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)))
            self.act = nn.Softsign().eval()
            self.scale = nn.Parameter(torch.full((8,), 0.5))
            self.net[2].weight = nn.Parameter(self.net[2].weight.detach().clone())
            self.out = nn.Linear(8, 8, bias=False)
            self.out.weight = self.net[2].weight
            self.table = torch.ones(1)
            self.register_buffer("own", torch.zeros(1), persistent=False)
            self.names = ["a", "b"]
            self.width = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.width == len(self.scale)
        assert self.names == ["a", "b"]
        return (self.out(self.act(self.net(x))) * self.scale).sum(1, keepdim=True) * self.table

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.own += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mse(self(batch[0]), batch[1])
        self.log("mse", self.mse)
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]


def launched(launcher: str, **settings: Any) -> Fit:
    return quiet(**{"strategy": "ddp", "devices": 2, "launcher": launcher, **settings})


def by_hand(module: Regression) -> Regression:
    module.configure_model()
    return train_by_hand(module, [*loader(SAMPLES, 8)], step=lambda batch, _: module.loss(batch))


@pytest.mark.parametrize(("launcher", "strategy"), [("fork", "fsdp"), ("forkserver", "ddp")])
def test_the_caller_gets_everything_back(launcher: str, strategy: str) -> None:  # I-15
    counting, stopping = Counting(), EarlyStopping("val_loss", patience=100)
    trainer = launched(launcher, strategy=strategy, max_epochs=2, callbacks=[counting, stopping])
    module, reference, losses = Late(), Late(), []
    trainer.fit(module, loader(SAMPLES, 4), loader(18, 4))
    for _ in range(2):
        by_hand(reference)
        with torch.no_grad():
            losses.append(float(reference.loss(data(18).tensors)))
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in reference.named_parameters()]
    torch.testing.assert_close(weights(module), weights(reference), **TIGHTER)
    assert module.out.weight is module.net[2].weight
    assert module.state_dict().keys() == reference.state_dict().keys()
    x = data(SAMPLES).tensors[0]
    torch.testing.assert_close(module(x), reference(x), **TIGHTER)
    assert int(module.steps) == int(module.own) == counting.batches == 8
    assert module.training
    assert not module.act.training
    metrics = trainer.callback_metrics
    assert {"loss", "loss_step", "loss_epoch", "mse", "val_loss"} <= set(metrics)
    assert [float(metrics[name]) for name in ("val_loss", "mse")] == pytest.approx([losses[1]] * 2, rel=1e-5)
    assert stopping.best_score == pytest.approx(min(losses), rel=1e-5)
    assert (trainer.global_step, trainer.current_epoch, trainer.samples_seen) == (8, 2, 64)
    assert (trainer.state, trainer.world_size, trainer.strategy.name) == ("finished", 2, strategy)
    assert module.trainer is trainer  # L-10
    (validated,) = trainer.validate(module, loader(18, 4), verbose=False)
    assert validated["val_loss"] == pytest.approx(losses[1], rel=1e-5)
    assert torch.equal(torch.cat(trainer.predict(module, loader(18, 4))), data(18).tensors[0])
    assert trainer.global_step == 8
    quiet().fit(module, loader(SAMPLES, 8))  # it can be trained further in this process
    torch.testing.assert_close(weights(module), weights(by_hand(reference)), **TIGHTER)


class Parametrized(Regression):
    """Builds a parametrized layer, which refuses to be pickled, once it knows the number of ranks, or in `setup`."""

    def __init__(self, in_setup: bool = False) -> None:
        super().__init__()
        self.in_setup = in_setup
        self.act: Any = None

    def build(self) -> None:
        if self.act is None and self.trainer.world_size == 2:
            self.act = seeded(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(1, 1)), nn.Softsign()))

    def configure_model(self) -> None:
        if not self.in_setup:
            self.build()
            torch.rand(1)  # as layers draw that are built without a seed

    def setup(self, stage: str) -> None:
        if self.in_setup:
            self.build()

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.act(self.net(batch[0])), batch[1])


def test_layers_that_cannot_be_pickled_come_back_if_configure_model_builds_them(tmp_path: Path) -> None:  # I-15
    module, reference = Parametrized(), Parametrized()
    reference.trainer = SimpleNamespace(world_size=2)  # type: ignore[assignment]
    before = torch.random.get_rng_state()
    launched("fork").fit(module, loader(SAMPLES, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(weights(module), weights(by_hand(reference)), **TIGHTER)
    assert module.loss(data(SAMPLES).tensors).isfinite()
    trainer = launched("fork", enable_checkpointing=True, default_root_dir=tmp_path)
    words = r"(?s)'act.0 \(ParametrizedLinear\)'.*build all layers in __init__ or"
    with pytest.raises(ConfigurationError, match=words):
        trainer.fit(Parametrized(in_setup=True), loader(SAMPLES, 4))
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.best_model_path  # the run has ended, and this process knows what it has saved


class Thawing(Regression):
    """Freezes a layer in a hook, changes the shape of a buffer, and sets one and removes another."""

    seen: torch.Tensor
    last: torch.Tensor | None
    first: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("first", torch.zeros(1))

    def setup(self, stage: str) -> None:
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = torch.cat([self.seen, torch.tensor([batch_idx])])
        self.last, self.first = torch.tensor(batch_idx), None
        return super().training_step(batch, batch_idx)


def test_frozen_layers_resized_buffers_and_other_dtypes_come_back_in_the_same_objects() -> None:  # I-15
    module = Thawing()
    before = list(module.parameters())
    pointers = [parameter.data_ptr() for parameter in before]
    launched("fork").fit(module, loader(SAMPLES, 4))
    assert [parameter.requires_grad for parameter in module.parameters()] == [False, False, True, True]
    assert module.seen.tolist() == [0, 1, 2, 3]
    assert module.last is not None
    assert module.last.item() == 3
    assert module.first is None
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    launched("fork", precision="bf16-true").fit(module, loader(SAMPLES, 4))
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
    assert {one.dtype for one in before} == {torch.bfloat16}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_module_comes_back_in_the_dtype_of_the_run(precision: str, strategy: str) -> None:  # I-15
    net = Net(norm="batch", buffer="in_place")
    late = precision == "64-true"
    assert not check(Program(strategy, 2, precision=precision, net=net, launcher="fork", configure_model=late))


@pytest.mark.parametrize("kind", [Regression, Late])
def test_above_the_limit_the_caller_is_told_where_the_weights_are(kind: Any, tmp_path: Path) -> None:  # I-15
    path = tmp_path / "epoch=0-step=4"
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": Checkpoint(dirpath=tmp_path)}
    for settings, wanted in ((saving, f"newest checkpoint is '{path}'"), ({}, "No checkpoint was saved")):
        module = kind()
        launched("fork", strategy=FSDPStrategy(gather_limit=0), **settings).fit(module, loader(SAMPLES, 4))
        assert all(parameter.is_meta for parameter in module.parameters())
        for trainer in (quiet(), launched("fork")):
            with pytest.raises(ConfigurationError, match=re.escape(wanted)):
                trainer.fit(module, loader(SAMPLES, 8))
        if settings:
            again = kind() if kind is Regression else module
            launched("fork", max_epochs=2).fit(again, loader(SAMPLES, 4), ckpt_path=path)
            torch.testing.assert_close(weights(again), weights(by_hand(by_hand(kind()))), **TIGHTER)


def test_the_best_checkpoint_is_known_after_a_run_in_other_processes(tmp_path: Path) -> None:
    # L-10: it is found in the run's folder, so that a test without a module uses the best weights
    kept = Checkpoint(monitor="val_loss", mode="min", save_top_k=1)
    saving: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path, "logger": "csv"}
    trainer = launched("fork", max_epochs=2, callbacks=[kept], **saving)
    module = Late()
    trainer.fit(module, loader(SAMPLES, 4), loader(18, 4))
    best = min(Path(f"{trainer.log_dir}/checkpoints").glob("epoch=*"))
    assert (kept.dirpath, kept.best_model_path) == (str(best.parent), str(best))
    assert kept.best_model_score is not None
    assert kept.best_model_score <= float(trainer.callback_metrics["val_loss"])
    (validated,) = trainer.validate(dataloaders=loader(18, 4), verbose=False)
    assert validated["val_loss"] == pytest.approx(kept.best_model_score, rel=1e-5)
    assert kept.best_model_path == str(best)
    trainer.max_epochs = 1
    trainer.fit(module, loader(SAMPLES, 4), loader(18, 4))
    assert kept.dirpath == f"{trainer.log_dir}/checkpoints"


def test_a_failed_run_changes_no_weights_and_the_next_one_trains() -> None:  # G-01, G-07
    module = Buggy("second forward", ranks=(1,))
    before = weights(module).clone()
    told = "(?s)Rank 1 failed with RuntimeError: mat1 and mat2 shapes.*in training_step"
    trainer = launched("fork")
    with pytest.raises(DistributedError, match=told):
        trainer.fit(module, loader(SAMPLES, 4))
    assert torch.equal(weights(module), before)
    assert trainer.interrupted
    module.where = "nowhere"
    launched("fork").fit(module, loader(SAMPLES, 4))
    torch.testing.assert_close(weights(module), weights(by_hand(Regression())))
