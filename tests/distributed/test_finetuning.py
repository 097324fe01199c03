"""Finetuning, which trains the backbone later than the head, equals a hand-written loop (L-02)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_near, quiet
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import TrainModule
from drivetrain.callbacks import BackboneFinetuning, BaseFinetuning, Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from worlds import on_ranks

SAMPLES, BATCH, EPOCHS, AT = 48, 8, 5, 2
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": DDPStrategy,
    "ddp, static graph": lambda: DDPStrategy(static_graph=True),
    "ddp, unused": lambda: DDPStrategy(find_unused_parameters=True),
    "fsdp": FSDPStrategy,
    "hsdp": lambda: FSDPStrategy(sharding="hybrid"),
    "fsdp x tp": lambda: FSDPStrategy(tensor_parallel=2),
}


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
            self.head = nn.Linear(4, 1)

    def configure_model(self) -> None:
        mesh = self.trainer.strategy.device_mesh
        if mesh is not None and "tensor" in mesh.mesh_dim_names:
            parallelize_module(self.backbone, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])).squeeze(1), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, generator=generator))


def by_hand(epochs: int = EPOCHS) -> tuple[dict[str, Tensor], list[list[float]]]:
    model = Net()
    model.backbone.requires_grad_(False)
    (optimizer,), (scheduler,) = model.configure_optimizers()
    rates: list[list[float]] = []
    rate = 0.0
    for epoch in range(epochs):
        head = optimizer.param_groups[0]["lr"]
        if epoch == AT:
            model.backbone.requires_grad_(True)
            rate = 0.1 * head
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": rate})
        elif epoch > AT:
            rate = min(4 * rate, head)
            optimizer.param_groups[1]["lr"] = rate
        rates.append([group["lr"] for group in optimizer.param_groups])
        for batch in DataLoader(rows(), batch_size=BATCH):
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
        scheduler.step()
    return model.state_dict(), rates


class Watched(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(AT, lambda epoch: 4.0)
        self.rates: list[list[float]] = []

    @property
    def state_key(self) -> str:
        return "BackboneFinetuning"

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def _run(strategy: str, world: int, folder: Path, epochs: int, path: Any = None) -> Any:
    watched = Watched()
    fit = quiet(
        strategy=STRATEGIES[strategy](),
        devices=world,
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[watched, Checkpoint(folder / "c", every_n_train_steps=1, save_top_k=-1)],
        enable_checkpointing=True,
    )
    module = Net()
    if path is not None:
        path = next((folder / "c").glob(f"epoch=*-step={path}"))
    fit.fit(module, DataLoader(rows(), batch_size=BATCH // (2 if "tp" in strategy else world)), ckpt_path=path)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, watched.rates


CASES = [(name, {"single": 1, "hsdp": 4, "fsdp x tp": 4}.get(name, 2)) for name in STRATEGIES]


@pytest.mark.parametrize(("strategy", "world"), CASES)
def test_finetuning_equals_the_hand_written_loop(strategy: str, world: int, tmp_path: Path) -> None:  # L-02
    wanted, rates = by_hand()
    for found, seen in on_ranks(_run, world, strategy, world, tmp_path, EPOCHS, process_group=None):
        assert_near(found, wanted)
        assert [len(one) for one in seen] == [1, 1, 2, 2, 2]
        for one, other in zip(seen, rates, strict=True):
            assert one == pytest.approx(other)


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        # within the second epoch, with the backbone frozen; between two epochs, where it is unfrozen
        (("single", 1), ("fsdp", 2), 7),
        (("ddp", 2), ("single", 1), 12),  # between two epochs, where it is unfrozen
        (("fsdp", 2), ("ddp", 2), 15),
        (("ddp", 2), ("hsdp", 4), 18),
        (("fsdp", 2), ("fsdp", 2), 21),
        (("fsdp x tp", 4), ("ddp", 2), 15),
        (("ddp", 2), ("fsdp x tp", 4), 21),
    ],
    ids=str,
)
def test_finetuning_resumes_in_mid_schedule(
    first: tuple[str, int], second: tuple[str, int], step: int, tmp_path: Path
) -> None:  # L-02
    on_ranks(_run, first[1], *first, tmp_path, 4, process_group=None)
    wanted, _ = by_hand()
    for found, _ in on_ranks(_run, second[1], *second, tmp_path, EPOCHS, step, process_group=None):
        assert_near(found, wanted)


def _under_zero(folder: Path) -> str:
    fit = quiet(strategy=DeepSpeedStrategy(stage=1), devices=2, max_epochs=2, callbacks=[BackboneFinetuning(1)])
    try:
        fit.fit(Net(), DataLoader(rows(), batch_size=4))
    except ConfigurationError as error:
        return str(error)
    return "trained"


def test_zero_refuses_finetuning(tmp_path: Path) -> None:  # L-02
    for said in on_ranks(_under_zero, 2, tmp_path, process_group=None):
        assert "add_param_group" in said


# One process


class Normed(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def fitted(module: TrainModule, *callbacks: Any, epochs: int = 2, **settings: Any) -> Any:
    fit = quiet(callbacks=list(callbacks), max_epochs=epochs, **settings)
    fit.fit(module, DataLoader(rows(), batch_size=BATCH))
    return fit


@pytest.mark.parametrize("train_bn", [True, False])
def test_batch_normalisation_trains_from_the_start_or_never(train_bn: bool) -> None:  # L-02
    module = Normed()
    norm: Any = module.backbone[1]
    before = [one.clone() for one in (norm.weight, norm.running_mean)]
    weights: list[bool] = []

    class Watching(BackboneFinetuning):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            weights.append(module.backbone[0].weight.requires_grad)
            assert norm.weight.requires_grad is train_bn

    fit = fitted(module, Watching(1, train_bn=train_bn))
    assert weights == [False, True]
    moved = [not torch.equal(one, other) for one, other in zip((norm.weight, norm.running_mean), before, strict=True)]
    assert moved == [train_bn, train_bn]
    assert [len(group["params"]) for group in fit.optimizers[0].param_groups] == [4 if train_bn else 2, 2]


def test_a_module_without_a_backbone_is_refused() -> None:  # L-02
    class Headless(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.backbone

    with pytest.raises(ConfigurationError, match=r"(?s)Headless has no submodule 'backbone'.*submodules are 'head'"):
        fitted(Headless(), BackboneFinetuning())


@pytest.mark.parametrize(
    "options",
    [{"unfreeze_backbone_at_epoch": -1}, {"unfreeze_backbone_at_epoch": 1.0}, {"backbone_initial_lr": -0.1}],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name(options: dict[str, Any]) -> None:  # L-02
    with pytest.raises(ConfigurationError, match=rf"BackboneFinetuning\({next(iter(options))}="):
        BackboneFinetuning(**options)


class Gradual(BaseFinetuning):
    """Unfreezes one more layer in each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.backbone[0], (module.backbone[1],)], train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch > 0:
            self.unfreeze_and_add_param_group(module.backbone[2 - epoch], optimizer)


def test_a_user_defined_schedule(tmp_path: Path) -> None:  # L-02
    def run(epochs: int, path: Any = None) -> tuple[Any, Normed]:
        module = Normed()
        torch.nn.init.ones_(module.head.weight)
        saver = Checkpoint(tmp_path / "c", save_top_k=-1)
        fit = quiet(callbacks=[Gradual(), saver], max_epochs=epochs, seed=1, enable_checkpointing=True)
        fit.fit(module, DataLoader(rows(), batch_size=BATCH), ckpt_path=path)
        return fit, module

    fit, module = run(3)
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == pytest.approx([0.1, 0.01, 0.01])
    again, resumed = run(3, next((tmp_path / "c").glob("epoch=1-*")))
    assert [len(group["params"]) for group in again.optimizers[0].param_groups] == [2, 2, 2]
    for (name, one), other in zip(module.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_parameters_already_in_the_optimizer_are_not_added(caplog: pytest.LogCaptureFixture) -> None:  # L-02
    class All(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit = fitted(All(), BackboneFinetuning(1), epochs=3)
    assert [group["lr"] for group in fit.optimizers[0].param_groups] == [0.1]
    assert "4 of the 4 parameters to unfreeze are in the optimizer already" in caplog.text


def test_an_optimizer_of_named_parameters_accepts_the_backbone(tmp_path: Path) -> None:  # L-02
    class Named(Net):
        def configure_optimizers(self) -> Any:
            trained = [(name, one) for name, one in self.named_parameters() if one.requires_grad]
            return torch.optim.AdamW(trained, lr=0.1)

    def run(epochs: int, path: Any = None) -> tuple[Any, Net]:
        module = Named()
        saver = Checkpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
        fit = quiet(callbacks=[BackboneFinetuning(1), saver], max_epochs=epochs, seed=1, enable_checkpointing=True)
        fit.fit(module, DataLoader(rows(), batch_size=BATCH), ckpt_path=path)
        return fit, module

    fit, module = run(3)
    head, backbone = fit.optimizers[0].param_groups
    assert head["param_names"] == [name for name, _ in module.named_parameters() if name.startswith("head")]
    assert backbone["param_names"] == [name for name, _ in module.named_parameters() if name.startswith("backbone")]
    for path in sorted((tmp_path / "c").glob("epoch=1-*"))[:2]:
        again, resumed = run(3, path)
        assert again.optimizers[0].param_groups[1]["param_names"] == backbone["param_names"]
        for (name, one), other in zip(module.state_dict().items(), resumed.state_dict().values(), strict=True):
            assert torch.equal(one, other), name


def test_a_backbone_that_is_overdue_on_resume_trains_at_once(tmp_path: Path) -> None:  # L-02
    saver = Checkpoint(tmp_path / "c", save_top_k=-1)
    fitted(Net(), BackboneFinetuning(10), saver, epochs=3, enable_checkpointing=True, default_root_dir=tmp_path)
    fit = quiet(callbacks=[BackboneFinetuning(1), Checkpoint(tmp_path / "c")], max_epochs=5, enable_checkpointing=True)
    module = Net()
    fit.fit(module, DataLoader(rows(), batch_size=BATCH), ckpt_path=next((tmp_path / "c").glob("epoch=2-*")))
    assert module.backbone[0].weight.requires_grad
    assert [len(group["params"]) for group in fit.optimizers[0].param_groups] == [2, 4]
