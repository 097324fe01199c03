"""StochasticWeightAveraging equals torch's SWALR, AveragedModel and update_bn in a hand-written loop (L-01)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_near, quiet
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import Checkpoint, StochasticWeightAveraging
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH, EPOCHS, FIRST = 48, 8, 6, 3
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "zero 1": lambda: DeepSpeedStrategy(stage=1),
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}
CASES = [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero 1", 2), ("zero 3", 2)]


class Net(TrainModule):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm: Any = nn.BatchNorm1d(4, momentum=0.3) if normed else nn.Identity()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x)).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.net[0].parameters()},
            {"params": self.net[2].parameters(), "lr": 0.05},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=generator) + 1, torch.randn(SAMPLES, generator=generator))


def by_hand(annealing: int, strategy: Any, normed: bool = False) -> tuple[dict[str, Tensor], list[list[float]]]:
    model = Net(normed)
    (optimizer,), (scheduler,) = model.configure_optimizers()
    averaged: Any = AveragedModel(model)
    swa: Any = None
    rates = []
    for epoch in range(EPOCHS):
        if epoch == FIRST:
            swa = SWALR(optimizer, [0.02, 0.04], annealing, strategy)  # type: ignore[arg-type]  # one for each group
        rates.append([group["lr"] for group in optimizer.param_groups])
        for batch in DataLoader(rows(), batch_size=BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
        if epoch >= FIRST:
            averaged.update_parameters(model)
            swa.step()
        else:
            scheduler.step()
    if normed:
        update_bn(DataLoader(rows(), batch_size=BATCH), averaged)
    return averaged.module.state_dict(), rates


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.logged: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5 // trainer.world_size:
            self.seen.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])


def swa(annealing: int = 2, strategy: str = "cos") -> StochasticWeightAveraging:
    return StochasticWeightAveraging([0.02, 0.04], FIRST + 1, annealing, strategy)


def _run(
    strategy: str, world: int, folder: Path, normed: bool, *options: Any, path: Any = None, steps: int = -1
) -> tuple[dict[str, Tensor], list[list[float]]]:
    rates = Rates()
    fit = quiet(
        strategy=STRATEGIES[strategy](),
        devices=world,
        max_epochs=EPOCHS,
        max_steps=steps,
        default_root_dir=folder,
        callbacks=[swa(*options), rates, Checkpoint(folder / "c", every_n_train_steps=1, save_top_k=-1)],
        enable_checkpointing=True,
    )
    module = Net(normed)
    fit.fit(module, DataLoader(rows(), batch_size=BATCH // world), ckpt_path=path)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, rates.seen


@pytest.mark.parametrize(("strategy", "world"), CASES)
@pytest.mark.parametrize(("annealing", "shape"), [(2, "cos")])
def test_the_average_equals_the_hand_written_one(
    strategy: str, world: int, annealing: int, shape: str, tmp_path: Path
) -> None:  # L-01
    wanted, rates = by_hand(annealing, shape)
    for found, seen in on_ranks(_run, world, strategy, world, tmp_path, False, annealing, shape, process_group=None):
        assert_near(found, wanted)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(rates))


@pytest.mark.parametrize(("annealing", "shape"), [(4, "linear"), (0, "cos"), (1, "linear")])
def test_learning_rates_equal_those_of_swalr(annealing: int, shape: str, tmp_path: Path) -> None:  # L-01
    wanted, rates = by_hand(annealing, shape)
    found, seen = _run("single", 1, tmp_path, False, annealing, shape)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(rates))
    assert_near(found, wanted)


def _resumed(first: tuple[str, int], second: tuple[str, int], folder: Path, step: int) -> Any:
    return _run(*second, folder, False, path=next((folder / "c").glob(f"epoch=*-step={step}")))


@pytest.mark.parametrize("step", [16, 27])
@pytest.mark.parametrize(("first", "second"), [(("fsdp", 2), ("single", 1)), (("ddp", 2), ("zero 3", 2))], ids=str)
def test_averaging_resumes_in_mid_schedule(
    first: tuple[str, int], second: tuple[str, int], step: int, tmp_path: Path
) -> None:  # L-01: before its first epoch, and within
    on_ranks(_run, first[1], *first, tmp_path, False, process_group=None)
    wanted, _ = by_hand(2, "cos")
    for found, _ in on_ranks(_resumed, second[1], first, second, tmp_path, step, process_group=None):
        assert_near(found, wanted)


def test_statistics_of_batch_normalisation_are_the_averages(tmp_path: Path) -> None:  # L-01
    wanted, _ = by_hand(2, "cos", normed=True)
    found, _ = _run("single", 1, tmp_path, True)
    assert_near(found, wanted)


class PartlyFrozen(Net):
    """Has four batch normalizations: one in eval mode, one that is not called, one frozen and one trained."""

    def __init__(self) -> None:
        super().__init__(normed=True)
        layers: Any = [nn.BatchNorm1d(4) for _ in range(3)]
        self.kept, self.idle, self.frozen = layers
        self.frozen.track_running_stats = False  # as left by finetuning with train_bn=False
        for layer in (self.kept, self.idle, self.frozen):
            layer.running_mean.fill_(0.5)

    def on_train_epoch_start(self) -> None:
        self.kept.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.kept(x) + self.frozen(x))


def test_statistics_of_inactive_layers_stay(tmp_path: Path) -> None:  # L-01
    module = PartlyFrozen()
    quiet(max_epochs=5, callbacks=[StochasticWeightAveraging(0.05)]).fit(module, DataLoader(rows(), batch_size=BATCH))
    for layer in (module.kept, module.idle, module.frozen):
        assert layer.running_mean.tolist() == [0.5] * 4
        assert layer.running_var.tolist() == [1.0] * 4
    assert int(module.norm.num_batches_tracked) == SAMPLES // BATCH
    assert torch.isfinite(module.norm.running_mean).all()


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimization_with_batch_normalisation_is_refused_before_it_trains() -> None:  # L-01
    averaging = StochasticWeightAveraging([0.05, 0.05])
    with pytest.raises(ConfigurationError, match="has batch normalization and uses manual optimization"):
        quiet(max_epochs=5, callbacks=[averaging]).fit(ByHand(normed=True), DataLoader(rows(), batch_size=BATCH))
    assert averaging.updates == 0
    quiet(max_epochs=5, callbacks=[averaging]).fit(ByHand(), DataLoader(rows(), batch_size=BATCH))
    assert averaging.updates == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_are_over_all_ranks_micro_batches(strategy: str, tmp_path: Path) -> None:  # L-01
    x = rows().tensors[0].split(BATCH // 2)
    mean, variance = torch.stack([one.mean(0) for one in x]).mean(0), torch.stack([one.var(0) for one in x]).mean(0)
    for found, _ in on_ranks(_run, 2, strategy, 2, tmp_path, True, process_group=None):
        torch.testing.assert_close(found["norm.running_mean"], mean)
        torch.testing.assert_close(found["norm.running_var"], variance)
        assert found["norm.num_batches_tracked"] == len(x)


@pytest.mark.parametrize(
    "options",
    [
        {"swa_lrs": 0.0},
        {"swa_lrs": []},
        {"swa_lrs": [0.1, -1.0]},
        {"swa_epoch_start": 0},
        {"swa_epoch_start": 1.5},
        {"annealing_epochs": -1},
        {"annealing_epochs": 2.0},
        {"annealing_strategy": "cosine"},
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_by_name(options: dict[str, Any]) -> None:  # L-01
    (name,) = options
    with pytest.raises(ConfigurationError, match=rf"StochasticWeightAveraging\({name}="):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **options})


@pytest.mark.parametrize(
    ("swa", "settings", "said"),
    [
        (StochasticWeightAveraging(0.1), {"max_epochs": None, "max_steps": 3}, "a fraction of max_epochs"),
        (StochasticWeightAveraging(0.1, swa_epoch_start=7), {"max_epochs": 6}, "nothing is averaged"),
        (StochasticWeightAveraging([0.1], swa_epoch_start=1), {"max_epochs": 1}, r"the optimizers have 2 group\(s\)"),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused_before_it_trains(
    swa: StochasticWeightAveraging, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:  # L-01
    fit = quiet(default_root_dir=tmp_path, callbacks=[swa], **settings)
    with pytest.raises(ConfigurationError, match=said):
        fit.fit(Net(), DataLoader(rows(), batch_size=BATCH))
    assert fit.global_step == 0


def test_a_fraction_refers_to_the_epochs(tmp_path: Path) -> None:  # L-01
    averaging = StochasticWeightAveraging(0.1)
    quiet(default_root_dir=tmp_path, callbacks=[averaging], max_epochs=10).fit(Net(), DataLoader(rows(), batch_size=24))
    assert averaging.updates == 3  # from the eighth epoch on
