"""StochasticWeightAveraging equals torch's SWALR, AveragedModel and update_bn in a hand-written loop (L-01)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from phased_training import dealt, state
from small_runs import STRATEGIES, assert_near, data, global_batches, loader, quiet, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from drivetrain import Callback, TrainModule
from drivetrain.callbacks import Checkpoint, StochasticWeightAveraging
from drivetrain.errors import ConfigurationError
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)

SAMPLES, BATCH, EPOCHS, FIRST = 48, 8, 6, 3


class Net(TrainModule):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm1d(4, momentum=0.3) if normed else nn.Identity()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        first, last = self.net[0].parameters(), self.net[2].parameters()
        optimizer = torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.05}], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def by_hand(annealing: int = 2, shape: Any = "cos", normed: bool = False) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the averages, and the learning rates of each epoch.

    Written by hand: the classes of torch define them.
    """
    model, rates = Net(normed), []
    (optimizer,), (scheduler,) = model.configure_optimizers()
    averaged: Any = AveragedModel(model)
    for epoch in range(EPOCHS):
        if epoch == FIRST:
            scheduler = SWALR(optimizer, [0.02, 0.04], annealing, shape)  # type: ignore[arg-type]  # one for each group
        rates.append([group["lr"] for group in optimizer.param_groups])
        for batch in global_batches(SAMPLES, BATCH):
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
        if epoch >= FIRST:
            averaged.update_parameters(model)
        scheduler.step()
    if normed:
        update_bn(loader(SAMPLES, BATCH), averaged)
    return averaged.module.state_dict(), rates


class Rates(Callback):
    """Records the learning rates in the last batch of each epoch."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.seen.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])


def _run(
    strategy: str, folder: Path, annealing: int = 2, shape: str = "cos", normed: bool = False, resume: int = 0
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Train, or resume from the checkpoint of a step; return the weights and the learning rates."""
    module, rates = Net(normed), Rates()
    averaging = StochasticWeightAveraging([0.02, 0.04], FIRST + 1, annealing, shape)
    checkpoints = Checkpoint(folder / "c", every_n_train_steps=9, save_top_k=-1)
    fit = quiet(
        strategy=STRATEGIES[strategy](),
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=[averaging, rates, checkpoints],
        enable_checkpointing=True,
    )
    path = next((folder / "c").glob(f"epoch=*-step={resume}")) if resume else None
    fit.fit(module, loader(SAMPLES, BATCH // dealt({})), ckpt_path=path)
    return state(module), rates.seen


@pytest.mark.parametrize(
    ("strategy", "ranks", "annealing", "shape"),
    [
        *[("single", 1, 4, "linear"), ("single", 1, 0, "cos"), ("single", 1, 1, "linear")],
        ("single, normed", 1, 2, "cos"),
        *[(strategy, 2, 2, "cos") for strategy in ("ddp", "fsdp", "zero 1", "zero 3")],
    ],
)
def test_weights_and_learning_rates_equal_the_hand_written_loop(
    strategy: str, ranks: int, annealing: int, shape: str, tmp_path: Path
) -> None:  # L-01
    normed = strategy == "single, normed"  # the statistics of batch normalization are the averages'
    wanted, rates = by_hand(annealing, shape, normed)
    case = (strategy.split(",")[0], tmp_path, annealing, shape, normed)
    for found, seen in on_ranks(_run, ranks, *case, process_group=None):
        assert_near(found, wanted)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(rates))


@pytest.mark.parametrize(("first", "second", "ranks"), [("fsdp", "single", 1), ("ddp", "zero 3", 2)])
def test_averaging_resumes_in_mid_schedule(first: str, second: str, ranks: int, tmp_path: Path) -> None:  # L-01
    on_ranks(_run, 2, first, tmp_path, process_group=None)
    wanted, _ = by_hand()
    for step in (9, 27):  # before the first epoch of the averages, and within
        case = (second, tmp_path, 2, "cos", False, step)
        for found, _ in on_ranks(_run, ranks, *case, process_group=None):
            assert_near(found, wanted)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_are_over_all_ranks_micro_batches(strategy: str, tmp_path: Path) -> None:  # L-01
    x = data(SAMPLES).tensors[0].split(BATCH // 2)
    mean, variance = torch.stack([one.mean(0) for one in x]).mean(0), torch.stack([one.var(0) for one in x]).mean(0)
    for found, _ in on_ranks(_run, 2, strategy, tmp_path, 2, "cos", True, process_group=None):
        torch.testing.assert_close(found["norm.running_mean"], mean)
        torch.testing.assert_close(found["norm.running_var"], variance)
        assert found["norm.num_batches_tracked"] == len(x)


class PartlyFrozen(Net):
    """Has four batch normalizations: one in eval mode, one that is not called, one frozen and one trained."""

    def __init__(self) -> None:
        super().__init__(normed=True)
        layers: Any = [nn.BatchNorm1d(4) for _ in range(3)]
        self.kept, self.idle, self.frozen = layers
        self.frozen.track_running_stats = False  # as left by finetuning with train_bn=False
        for layer in layers:
            layer.running_mean.fill_(0.5)

    def on_train_epoch_start(self) -> None:
        self.kept.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.kept(x) + self.frozen(x))


def test_statistics_of_inactive_layers_stay() -> None:  # L-01
    module = PartlyFrozen()
    quiet(max_epochs=5, callbacks=[StochasticWeightAveraging(0.05)]).fit(module, loader(SAMPLES, BATCH))
    for layer in (module.kept, module.idle, module.frozen):
        assert layer.running_mean.tolist() == [0.5] * 4
        assert layer.running_var.tolist() == [1.0] * 4
    assert int(module.norm.num_batches_tracked) == SAMPLES // BATCH
    assert torch.isfinite(module.norm.running_mean).all()


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def test_manual_optimization_and_a_fraction_of_the_epochs() -> None:  # L-01
    averaging = StochasticWeightAveraging([0.05, 0.05])
    quiet(max_epochs=5, callbacks=[averaging]).fit(Manual(), loader(SAMPLES, BATCH))
    assert averaging.updates == 2
    averaging = StochasticWeightAveraging(0.1)
    quiet(max_epochs=10, callbacks=[averaging]).fit(Net(), loader(SAMPLES, 24))
    assert averaging.updates == 3  # from the eighth epoch on


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("swa_lrs", 0.0), ("swa_lrs", []), ("swa_lrs", [0.1, -1.0])],
        *[("swa_epoch_start", 0), ("swa_epoch_start", 1.5)],
        *[("annealing_epochs", -1), ("annealing_epochs", 2.0), ("annealing_strategy", "cosine")],
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, value: Any) -> None:  # L-01
    with pytest.raises(ConfigurationError, match=rf"StochasticWeightAveraging\({name}="):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, name: value})


@pytest.mark.parametrize(
    ("module", "arguments", "settings", "words"),
    [
        (Net(), (0.1,), {"max_epochs": None, "max_steps": 3}, "a fraction of max_epochs"),
        (Net(), (0.1, 7), {"max_epochs": 6}, "nothing is averaged"),
        (Net(), ([0.1], 1), {"max_epochs": 1}, r"the optimizers have 2 group\(s\)"),
        (Manual(normed=True), ([0.1, 0.1],), {"max_epochs": 5}, "batch normalization and uses manual optimization"),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused_before_it_trains(
    module: Net, arguments: Any, settings: dict[str, Any], words: str
) -> None:  # L-01
    averaging = StochasticWeightAveraging(*arguments)
    fit = quiet(callbacks=[averaging], **settings)
    with pytest.raises(ConfigurationError, match=words):
        fit.fit(module, loader(SAMPLES, BATCH))
    assert (fit.global_step, averaging.updates) == (0, 0)
