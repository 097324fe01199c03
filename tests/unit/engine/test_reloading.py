"""reload_dataloaders_every_n_epochs, also in resumed runs. Row L-07."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import QUIET
from small_modules import calling
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate, random_split

from drivetrain import DataModule, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from oracle.data_loaders import Stateful

SAMPLES = 24
WINDOWS = {"accumulate_grad_batches": 2, "val_check_interval": 0.5}


def quiet(**settings: Any) -> Fit:
    options = {"accelerator": "cpu", "max_epochs": 4, "num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": 1}
    return Fit(**{**QUIET, **options, **settings})


class Sequences(Dataset[Any]):
    """Sequences of equal length, each filled with its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, torch.linspace(0, 1, 8)[: self.length] * (index + 1) / SAMPLES


class Scheduled(DataModule):
    """Batches and sequences grow with the epochs. A random subset is held out."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        self.asked.append(("train", epoch))
        kept, _ = random_split(Sequences(2 + epoch), [SAMPLES - 2 * epoch, 2 * epoch])
        return DataLoader(kept, batch_size=2 * (epoch + 1), shuffle=True)

    def val_dataloader(self) -> Any:
        self.asked.append(("val", self.trainer.current_epoch))
        return DataLoader(Sequences(2 + self.trainer.current_epoch), batch_size=6)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, generator=generator))
        self.dropout = nn.Dropout(0.3)
        self.seen: list[tuple[int, list[int], int]] = []
        self.validated: list[int] = []
        """The length of the sequences of each validation batch."""
        self.rates: list[float] = []

    def loss(self, batch: Any) -> Any:
        _, x = batch
        return (self.dropout(x) * self.weight[: x.shape[1]]).sum(1).sub(1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.current_epoch, batch[0].tolist(), batch[1].shape[1]))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append(batch[1].shape[1])
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("every", "epochs"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])])
def test_loaders_are_reloaded_every_n_epochs(every: int, epochs: list[int]) -> None:  # L-07
    source, net = Scheduled(), Net()
    fit = quiet(max_epochs=5, reload_dataloaders_every_n_epochs=every)
    fit.fit(net, datamodule=source)
    assert source.asked == [(kind, epoch) for epoch in epochs for kind in ("train", "val")]
    loaded = [epoch - epoch % every if every else 0 for epoch in range(5)]
    assert net.validated == [2 + of for of in loaded for _ in range(4)]
    for epoch, of in enumerate(loaded):
        batches = [samples for number, samples, _ in net.seen if number == epoch]
        together = [sample for samples in batches for sample in samples]
        assert {len(samples) for samples in batches[:-1]} == {2 * (of + 1)}
        assert len(set(together)) == len(together) == SAMPLES - 2 * of
        assert {length for number, _, length in net.seen if number == epoch} == {2 + of}
    assert fit.num_training_batches == len([one for one in net.seen if one[0] == 4])


def test_loaders_built_for_an_estimate_in_setup_are_reloaded_too() -> None:  # L-07
    class Early(Net):
        def setup(self, stage: str) -> None:
            assert self.trainer.estimated_stepping_batches == 24

    source, net = Scheduled(), Early()
    quiet(max_epochs=2).fit(net, datamodule=source)
    assert [epoch for kind, epoch in source.asked if kind == "train"] == [0, 0, 1]
    assert [length for epoch, _, length in net.seen if epoch == 1] == [3] * 6


def trained(source: DataModule, ckpt_path: Any = None, **options: Any) -> tuple[dict[str, Any], Net]:
    """Train, and return what a resumed run must arrive at too."""
    fit, net = quiet(**options), Net()
    fit.fit(net, datamodule=source, ckpt_path=ckpt_path)
    state = {
        "weights": dict(net.state_dict()),
        "optimizer": fit.optimizers[0].state_dict()["state"],
        "rates": net.rates[-1],
        "seen": net.seen[-1],
        "counters": (fit.global_step, fit.samples_seen, fit.micro_batches, fit.current_epoch),
        "val": fit.callback_metrics["val"],
    }
    return state, net


@pytest.mark.parametrize(("every", "settings"), [(1, WINDOWS), (2, {})])
def test_a_resumed_run_equals_the_uninterrupted_run(every: int, settings: Any, tmp_path: Path) -> None:  # L-07
    options = {"reload_dataloaders_every_n_epochs": every, **settings}
    by_step = Checkpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    by_epoch = Checkpoint(tmp_path / "epochs", filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    wanted, _ = trained(Scheduled(), callbacks=[by_step, by_epoch], **options)
    steps = sorted((tmp_path / "steps").glob("*=*"), key=lambda path: int(path.name.rpartition("=")[2]))
    assert len(steps) == wanted["counters"][0]
    for path in (*steps[:-1:3], *sorted((tmp_path / "epochs").glob("*=*"))[:-1]):
        found, _ = trained(Scheduled(), path, **options)
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=f"{path.name} {name} differs")


class Weighted(Scheduled):
    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(epoch))
        return DataLoader(Sequences(2 + epoch), batch_size=2 + epoch, sampler=sampler)


class Positioned(Scheduled):
    def train_dataloader(self) -> Any:
        size = 2 + self.trainer.current_epoch
        samples = [Sequences(size)[index] for index in range(SAMPLES)]
        batches: Any = [default_collate(samples[first : first + size]) for first in range(0, SAMPLES, size)]
        return Stateful(batches)


@pytest.mark.parametrize("source", [Scheduled, Weighted, Positioned])
def test_a_run_preempted_within_a_window_resumes_there(source: type[Scheduled], tmp_path: Path) -> None:  # L-07
    def leave(trainer: Any) -> None:
        if (trainer.current_epoch, trainer.batch_idx) == (2, 3):
            os.kill(os.getpid(), signal.SIGTERM)

    options: dict[str, Any] = {"accumulate_grad_batches": 2, "default_root_dir": tmp_path}
    wanted, _ = trained(source(), **options)
    leaving = calling("on_train_batch_end", leave)
    with pytest.raises(SystemExit):
        trained(source(), callbacks=[leaving, Checkpoint(tmp_path)], **options)
    found, net = trained(source(), "last", callbacks=[Checkpoint(tmp_path)], **options)
    assert net.seen[0][0] == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_going_back_reloads_the_loaders_of_that_epoch(tmp_path: Path) -> None:  # L-07
    kept = str(tmp_path / "kept")
    went_back: list[int] = []

    def go_back_once(trainer: Any) -> None:
        at = (trainer.current_epoch, trainer.batch_idx)
        if at == (1, 2) and not went_back:
            trainer.save_checkpoint(kept)
        if at == (3, 1) and not went_back:
            went_back.append(trainer.global_step)
            trainer.roll_back(kept)

    source = Scheduled()
    found, _ = trained(source, callbacks=calling("on_train_batch_end", go_back_once))
    assert [epoch for kind, epoch in source.asked if kind == "train"] == [0, 1, 2, 3, 1, 2, 3]
    torch.testing.assert_close(found, trained(Scheduled())[0], rtol=0, atol=0)


def test_a_loader_passed_to_fit_is_not_reloaded(caplog: pytest.LogCaptureFixture) -> None:  # L-07
    caplog.set_level("INFO", "drivetrain")
    net, loader = Net(), DataLoader(Sequences(3), batch_size=4)
    quiet(max_epochs=2).fit(net, loader)
    assert caplog.text.count("a training loader was passed to fit: it is not rebuilt") == 1
    assert {length for _, _, length in net.seen} == {3}


@pytest.mark.parametrize(
    ("batch_sizes", "interval", "validations"), [([4, 8, 12], 3, [3, 6, 9, 11]), ([8, 4], 5, [3, 8])]
)
def test_an_interval_longer_than_an_epoch_becomes_the_epochs(
    batch_sizes: list[int], interval: int, validations: list[int], tmp_path: Path
) -> None:  # L-07
    class Resized(Scheduled):
        def train_dataloader(self) -> Any:
            return DataLoader(Sequences(2), batch_size=batch_sizes[self.trainer.current_epoch])

    steps: list[int] = []
    counting = calling("on_validation_end", lambda trainer: steps.append(trainer.global_step))
    saving = Checkpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"max_epochs": len(batch_sizes), "val_check_interval": interval}
    wanted, net = trained(Resized(), callbacks=[counting, saving], **options)
    assert steps == validations
    found, rest = trained(Resized(), tmp_path / f"step={len(net.seen) - 1}", **options)
    assert len(rest.seen) == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_workers_end_with_their_loader() -> None:  # L-07
    others = set(torch.multiprocessing.active_children())
    workers: list[int] = []

    class Working(Scheduled):
        def train_dataloader(self) -> Any:
            workers.append(len(set(torch.multiprocessing.active_children()) - others))
            return DataLoader(Sequences(2), 6, num_workers=1, persistent_workers=True)

    quiet(max_epochs=3, limit_val_batches=0).fit(Net(), datamodule=Working())
    assert workers == [0, 0, 0]
    assert set(torch.multiprocessing.active_children()) == others
