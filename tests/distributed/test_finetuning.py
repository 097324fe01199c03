"""Finetuning, which trains the backbone later than the head, equals a hand-written loop (L-02)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_near, global_batches, loader, quiet, refusal, seeded
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from drivetrain import TrainModule
from drivetrain.callbacks import BackboneFinetuning, BaseFinetuning, Checkpoint, LambdaCallback
from drivetrain.testing import assert_close_states
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from worlds import on_ranks

SAMPLES, BATCH, EPOCHS, AT = 24, 8, 4, 1
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "single": (1, lambda: "auto"),
    "ddp": (2, DDPStrategy),
    "ddp, static graph": (2, lambda: DDPStrategy(static_graph=True)),
    "fsdp": (2, FSDPStrategy),
    "hsdp": (4, lambda: FSDPStrategy(sharding="hybrid")),
    "fsdp x tp": (4, lambda: FSDPStrategy(tensor_parallel=2)),
    "hsdp x tp": (4, lambda: FSDPStrategy(sharding="hybrid", replicate_size=2, tensor_parallel=2)),
}


class Net(TrainModule):
    """A backbone, which may have a norm, and a head; ``rates`` are those of each epoch's start."""

    def __init__(self, norm: bool = False, all_at_once: bool = False) -> None:
        super().__init__()
        self.backbone = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()))
        if norm:
            self.backbone[1] = nn.BatchNorm1d(4)
        self.head = seeded(lambda: nn.Linear(4, 1))
        self.all_at_once, self.named = all_at_once, norm
        self.rates: list[list[float]] = []

    def configure_model(self) -> None:
        mesh = self.trainer.strategy.device_mesh
        if mesh is not None and "tensor" in mesh.mesh_dim_names:
            parallelize_module(self.backbone, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def on_train_epoch_start(self) -> None:
        self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        trained = [one for one in self.named_parameters() if self.all_at_once or one[1].requires_grad]
        optimizer = torch.optim.AdamW(trained if self.named else [one for _, one in trained], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


@pytest.fixture(scope="module")
def by_hand() -> tuple[dict[str, Tensor], list[list[float]]]:
    # Written by hand: programs of the oracle do not change the rate of a group that was added.
    model = Net()
    model.backbone.requires_grad_(False)
    (optimizer,), (scheduler,) = model.configure_optimizers()
    rates: list[list[float]] = []
    rate = 0.0
    for epoch in range(EPOCHS):
        head = optimizer.param_groups[0]["lr"]
        if epoch == AT:
            model.backbone.requires_grad_(True)
            rate = 0.1 * head
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": rate})
        elif epoch > AT:
            rate = min(4 * rate, head)
            optimizer.param_groups[1]["lr"] = rate
        rates.append([group["lr"] for group in optimizer.param_groups])
        for batch in global_batches(SAMPLES, BATCH):
            optimizer.zero_grad()
            model.training_step(batch, 0).backward()
            optimizer.step()
        scheduler.step()
    return model.state_dict(), rates


def fitted(module: Any, callbacks: Any, folder: Path, resumed_at: str = "", ranks: int = 1, **settings: Any) -> Any:
    """Train with a finetuning and a checkpoint at every multiple of a step, or resume from one; return the `Fit`."""
    saver = Checkpoint(folder / "c", every_n_train_steps=settings.pop("save_at", 3), save_top_k=-1)
    path = next((folder / "c").glob(resumed_at)) if resumed_at else None
    settings = {"max_epochs": EPOCHS, **settings}
    fit = quiet(callbacks=[*callbacks, saver], enable_checkpointing=True, default_root_dir=folder, seed=1, **settings)
    fit.fit(module, loader(SAMPLES, BATCH // ranks, shuffle=False), ckpt_path=path)
    return fit


def _run(strategy: str, folder: Path, save_at: int, resumed_at: int = 0) -> tuple[dict[str, Tensor], list[list[float]]]:
    ranks, make = STRATEGIES[strategy]
    path = f"epoch=*-step={resumed_at}" if resumed_at else ""
    settings: dict[str, Any] = {"strategy": make(), "devices": ranks, "save_at": save_at}
    module = Net()
    fitted(
        module, [BackboneFinetuning(AT, lambda epoch: 4.0)], folder, path, 2 if "tp" in strategy else ranks, **settings
    )
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, module.rates


@pytest.mark.parametrize(
    ("first", "step", "second"),
    [
        pytest.param("single", 2, "fsdp", id="resumed frozen"),
        pytest.param("ddp", 3, "single", id="resumed between two epochs, where it is unfrozen"),
        pytest.param("fsdp", 5, "fsdp x tp", id="resumed in the first epoch of the backbone"),
        pytest.param("fsdp x tp", 8, "ddp", id="resumed in the second epoch of the backbone"),
        pytest.param("ddp, static graph", 100, "", id="static graph"),
        pytest.param("hsdp", 4, "hsdp x tp", id="hsdp"),
        pytest.param("hsdp x tp", 7, "hsdp", id="hsdp and tensor parallel"),
    ],
)
def test_finetuning_equals_the_hand_written_loop_and_resumes_in_mid_schedule(
    first: str, step: int, second: str, tmp_path: Path, by_hand: Any
) -> None:  # L-02
    wanted, rates = by_hand
    for found, seen in on_ranks(_run, STRATEGIES[first][0], first, tmp_path, step, process_group=None):
        assert_near(found, wanted)
        assert [len(one) for one in seen] == [1, 2, 2, 2]
        for one, other in zip(seen, rates, strict=True):
            assert one == pytest.approx(other)
    if second:
        for found, _ in on_ranks(_run, STRATEGIES[second][0], second, tmp_path, 100, step, process_group=None):
            assert_near(found, wanted)


@pytest.mark.parametrize("train_bn", [True, False])
def test_batch_normalisation_trains_from_the_start_or_never(train_bn: bool, tmp_path: Path) -> None:
    module = Net(norm=True)
    norm: Any = module.backbone[1]
    before = [one.clone() for one in (norm.weight, norm.running_mean)]
    trains: list[bool] = []

    def record(trainer: Any, module: Any) -> None:
        trains.extend((module.backbone[0].weight.requires_grad, norm.weight.requires_grad))

    callbacks = [BackboneFinetuning(1, train_bn=train_bn), LambdaCallback(on_train_epoch_end=record)]
    fit = fitted(module, callbacks, tmp_path, max_epochs=2)
    assert trains == [False, train_bn, True, train_bn]
    moved = [not torch.equal(one, other) for one, other in zip((norm.weight, norm.running_mean), before, strict=True)]
    assert moved == [train_bn, train_bn]
    assert [len(group["params"]) for group in fit.optimizers[0].param_groups] == [4 if train_bn else 2, 4]


def test_a_module_without_a_backbone_is_refused() -> None:
    module = Net()
    del module.backbone
    text = refusal(module, loader(8, 8), callbacks=BackboneFinetuning())
    assert text.startswith("ConfigurationError")
    assert "Net has no submodule 'backbone'" in text


class Gradual(BaseFinetuning):
    """Unfreezes one more layer in each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.backbone[0], (module.backbone[1:3],)], train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch > 0:
            self.unfreeze_and_add_param_group(module.backbone[3 - epoch], optimizer)


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        pytest.param(Gradual, [0.05, 0.005, 0.005, 0.005], id="user-defined"),
        pytest.param(lambda: BackboneFinetuning(1, train_bn=False), [0.05, 0.04], id="backbone"),
    ],
)
def test_a_schedule_resumes_in_one_process_with_its_groups(make: Any, rates: Any, tmp_path: Path) -> None:
    module, resumed = Net(norm=True), Net(norm=True)
    fit = fitted(module, [make()], tmp_path)
    again = fitted(resumed, [make()], tmp_path, "epoch=1-step=6")
    groups = fit.optimizers[0].param_groups
    assert [group["lr"] for group in groups] == pytest.approx(rates)
    assert [len(one["params"]) for one in again.optimizers[0].param_groups] == [len(one["params"]) for one in groups]
    assert_close_states(resumed.state_dict(), module.state_dict(), atol=0, rtol=0)


def test_parameters_already_in_the_optimizer_are_not_added(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fit = fitted(Net(all_at_once=True), [BackboneFinetuning(1)], tmp_path, max_epochs=3)
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == [0.05]
    assert "4 of the 4 parameters to unfreeze are in the optimizer already" in caplog.text


def test_a_backbone_that_is_overdue_on_resume_trains_at_once(tmp_path: Path) -> None:
    fitted(Net(), [BackboneFinetuning(10)], tmp_path)
    module = Net()
    fit = fitted(module, [BackboneFinetuning(1)], tmp_path, "epoch=2-*", max_epochs=5)
    assert module.backbone[0].weight.requires_grad
    assert [len(group["params"]) for group in fit.optimizers[0].param_groups] == [2, 4]
