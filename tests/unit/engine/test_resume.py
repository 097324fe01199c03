"""A resumed run equals the uninterrupted one bit for bit: F-02, F-12, F-16."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_case import Tiny, fit, loader
from small_modules import calling
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Callback, CheckpointError, TrainModule
from drivetrain.checkpoint import SaveRequest
from drivetrain.data import CombinedLoader

STEPS = 12  # two epochs of 18 micro-batches, three per step
SAMPLES = 54


class Augmented(Dataset[Any]):
    """Draws from every generator when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(3) + random.random() + numpy.random.rand()
        return torch.cat([torch.tensor([float(index) / SAMPLES]), noise.float()])


class Stream(IterableDataset[Any]):
    """A stream of unknown length in random order, split over workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in torch.randperm(SAMPLES).tolist()[number::count]:
            yield torch.cat([torch.tensor([float(index) / SAMPLES]), torch.rand(3)])


class Positioned(Stream):
    """A data set with a state_dict of its position."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.order:
            self.order = torch.randperm(SAMPLES).tolist()
        for index in self.order[self.read :]:
            self.read += 1
            yield torch.cat([torch.tensor([float(index) / SAMPLES]), torch.rand(3)])
        self.order, self.read = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "read": self.read}

    def load_state_dict(self, state: Any) -> None:
        self.order, self.read = state["order"], state["read"]


class Everything(TrainModule):
    """Uses random numbers, averages its weights, logs, validates, and has schedulers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses: list[float] = []
        self.calls: list[str] = []
        self.average = {name: value.clone() for name, value in self.net.state_dict().items()}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch["a"] if isinstance(batch, dict) else batch
        loss = (self.net(batch[:, :4]) - batch[:, :1]).square().mean() + 0.01 * random.random() + 0.01 * torch.rand(())
        self.log("loss", loss, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.net(batch[:, :4]) * torch.rand(())).mean())
        self.calls.append(f"validation {self.global_step}")

    def on_train_epoch_start(self) -> None:
        torch.rand(2)
        self.calls.append(f"epoch {self.current_epoch} starts")

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_epoch"]))
        self.calls.append(f"epoch {self.current_epoch} ends")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in self.net.state_dict().items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * value

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.average = checkpoint["average"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], gamma=0.5)
        epochs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": epochs, "interval": "epoch", "monitor": "loss_epoch"},
        ]


class SaveEverywhere(Callback):
    """Saves at every hook at which a checkpoint can be written."""

    priority = -1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, tuple[int, int]] = {}
        for hook in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            setattr(self, hook, partial(self._save, hook))

    def _save(self, hook: str, trainer: Any, module: Any, *args: Any) -> None:
        if not trainer.run_state.progress.within_window and not trainer.sanity_checking:
            trainer.save(partial(self._write, hook, trainer, module))

    def _write(self, hook: str, trainer: Any, module: Any) -> None:
        name = f"{hook}-{trainer.micro_batches:03d}"
        self.saved[name] = len(module.losses), len(module.calls)
        trainer.save_checkpoint(self.folder / name)


PERSISTENT: Any = {"shuffle": True, "num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}
KINDS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Augmented(), 3, shuffle=True),
    "in order": lambda: DataLoader(Augmented(), 3),
    "two workers": lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(Augmented(), 3, **PERSISTENT),
    "iterable": lambda: DataLoader(Stream(), 3),
    "iterable in workers": lambda: DataLoader(Stream(), 3, num_workers=2, drop_last=True),
    "iterable with a state": lambda: DataLoader(Positioned(), 3),
    "combined": lambda: CombinedLoader(
        {"a": DataLoader(Augmented(), 3, shuffle=True), "b": DataLoader(Augmented(), 6, shuffle=True)}, "max_size_cycle"
    ),
}


def run(path: Path, kind: str, callbacks: Any, ckpt_path: Any = None, steps: int = STEPS, **options: Any) -> Any:
    """Train, and return the module and what a resumed run must arrive at too."""
    module = Everything()
    # 6 steps per epoch; validation after 4 of them, and none at its end
    settings = {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 12, "seed": 7, **options}
    trainer = fit(path, callbacks=callbacks, **settings)
    trainer.fit(module, KINDS[kind](), DataLoader(Augmented(), 27), ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    state = {**module.net.state_dict(), **{f"average.{name}": value for name, value in module.average.items()}}
    plain = {name: value.tolist() for name, value in state.items()}
    return module, plain, rates, dict(trainer.callback_metrics)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*(pytest.param(kind, 7, id=kind) for kind in KINDS), pytest.param("shuffled", None, id="shuffled without a seed")],
)
def test_a_run_resumed_from_any_place_equals_the_uninterrupted_one(kind: str, seed: int | None, tmp_path: Path) -> None:
    # F-02, F-12, F-16, B-10
    saver = SaveEverywhere(tmp_path)
    whole, *wanted = run(tmp_path, kind, [saver], seed=seed)
    assert len([name for name in saver.saved if name.startswith("on_train_batch_end")]) == STEPS
    assert len({name.partition("-")[0] for name in saver.saved}) == 3
    del saver.saved["on_train_epoch_end-036"]  # a finished run has nothing left to do (I-17)
    # Starting workers is slow: every third point is enough there.
    places = list(saver.saved.items())[:: 3 if "worker" in kind or seed is None else 1]
    for name, (losses, calls) in places:
        module, *found = run(tmp_path, kind, [], tmp_path / name, seed=seed)
        assert module.losses == whole.losses[losses:], name
        assert module.calls == whole.calls[calls:], name
        assert found == wanted, name


def test_a_resumed_run_can_be_extended_within_an_epoch(tmp_path: Path) -> None:  # F-02
    _, weights, *_ = run(tmp_path, "shuffled", [])
    saving = calling("on_fit_end", lambda trainer: trainer.save_checkpoint(tmp_path / "short"))
    run(tmp_path, "shuffled", [saving], steps=5, max_steps=5, max_epochs=-1)
    _, found, *_ = run(tmp_path, "shuffled", [], tmp_path / "short")
    assert found == weights


def test_a_resume_keeps_the_seed_and_does_not_read_skipped_samples(tmp_path: Path) -> None:  # F-02, F-03
    run(tmp_path, "shuffled", [SaveEverywhere(tmp_path)])
    saved = tmp_path / "on_train_batch_end-015"
    with pytest.raises(CheckpointError, match=r"seed=8.*had seed=7"):
        run(tmp_path, "shuffled", [], saved, seed=8)
    read: list[int] = []

    class Counted(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return super().__getitem__(index)

    trainer = fit(tmp_path, max_epochs=1, accumulate_grad_batches=3, seed=7)
    trainer.fit(Everything(), DataLoader(Counted(), 3, shuffle=True), ckpt_path=saved)
    assert len(read) == SAMPLES - 15 * 3


def validated(path: Path, batch: int, *saving: Callback, resumed: Path | None = None, **options: Any) -> Any:
    """Return the epoch and the samples used before each validation of a run."""
    found: list[tuple[int, int]] = []
    noting = calling("on_validation_end", lambda trainer: found.append((trainer.current_epoch, trainer.samples_seen)))
    trainer = fit(path, max_epochs=2, num_sanity_val_steps=0, callbacks=[noting, *saving], **options)
    trainer.fit(Tiny(), loader(12, batch), loader(2), ckpt_path=resumed)
    return found


@pytest.mark.parametrize(
    ("interval", "hook", "nth", "expected"),
    [
        (None, "on_validation_end", 0, [(1, 24)]),  # the epoch's own validation was over, and ran again
        (None, "on_train_batch_end", 5, [(0, 12), (1, 24)]),
        (2, "on_validation_end", 0, [(0, 8), (1, 20)]),
        (2, "on_train_batch_end", 1, [(0, 4), (0, 8), (1, 20)]),  # the first was due, but was skipped
        (0.5, "on_train_batch_end", 2, [(0, 6), (0, 10), (0, 12), (1, 16), (1, 20), (1, 24)]),
    ],
)
def test_validation_keeps_its_schedule(interval: Any, hook: str, nth: int, expected: Any, tmp_path: Path) -> None:
    # F-02: batches of four instead of two, as on half as many ranks
    saved, calls = tmp_path / "saved", itertools.count()

    def save(trainer: Any) -> None:
        if next(calls) == nth:
            trainer.save(lambda: SaveRequest(str(saved)))

    validated(tmp_path, 2, calling(hook, save), val_check_interval=interval)
    assert validated(tmp_path, 4, resumed=saved, val_check_interval=interval) == expected
