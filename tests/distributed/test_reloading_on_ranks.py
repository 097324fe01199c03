"""Reloaded loaders on two ranks: on all at once, and in resumed runs on as many ranks or fewer. L-07."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, failing, quiet, weights
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, DataModule
from worlds import on_ranks

SAMPLES = 30


def numbered() -> TensorDataset:
    """Samples that are identified by their last feature."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    x[:, -1] = torch.arange(SAMPLES) / SAMPLES
    return TensorDataset(x, x.sum(1, keepdim=True))


class Growing(DataModule):
    """Has batches of 2, 3 and 4 samples in epochs 0, 1 and 2."""

    def train_dataloader(self) -> Any:
        return DataLoader(numbered(), batch_size=2 + self.trainer.current_epoch, shuffle=True)


class Watching(Regression):
    """Records its samples by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.2))
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.joining:
            self.seen.append((self.current_epoch, (batch[0][:, -1] * SAMPLES).round().int().tolist()))
        return super().training_step(batch, batch_idx)


class SaverWithin(Callback):
    """Saves after the third batch of the second epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            trainer.defer_save(lambda: trainer.save_checkpoint(self.path))


def _fit(module: Watching, strategy: str, **options: Any) -> None:
    callbacks = options.pop("callbacks", [])
    fit = quiet(strategy=strategy, max_epochs=3, seed=4, reload_dataloaders_every_n_epochs=1, callbacks=callbacks)
    fit.fit(module, datamodule=Growing(), **options)


def _twice(folder: str) -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        whole, rest, path = Watching(), Watching(), f"{folder}/{strategy}"
        _fit(whole, strategy, callbacks=[SaverWithin(path)])
        _fit(rest, strategy, ckpt_path=path)
        found[strategy] = (weights(whole), weights(rest), whole.seen, rest.seen)
    return found


def _samples(seen: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return [sample for number, samples in seen if number == epoch for sample in samples]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("kept")
    return folder, on_ranks(_twice, 2, str(folder), process_group=None, timeout=100)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_on_as_many_ranks_resumes_bit_for_bit(trained: Any, strategy: str) -> None:  # L-07
    for whole, rest, seen, seen_after in (rank[strategy] for rank in trained[1]):
        assert torch.equal(whole, rest)
        assert seen[-len(seen_after) :] == seen_after
        assert [len(samples) for epoch, samples in seen if epoch == 1][:-1] == [3] * 4


def test_a_run_on_fewer_ranks_uses_the_remaining_samples(trained: Any) -> None:  # L-07
    folder, ranks = trained
    module = Watching()
    _fit(module, "single_device", ckpt_path=str(folder / "ddp"))
    before = [
        sample
        for rank in ranks
        for _, samples in [one for one in rank["ddp"][2] if one[0] == 1][:3]
        for sample in samples
    ]
    assert sorted(before + _samples(module.seen, 1)) == list(range(SAMPLES))
    assert {len(samples) for epoch, samples in module.seen if epoch == 1} == {3}
    # The last epoch is the one that it would have been without the resume.
    apart = [[samples for epoch, samples in rank["ddp"][2] if epoch == 2] for rank in ranks]
    together = [sample for both in zip(*apart, strict=True) for samples in both for sample in samples]
    assert _samples(module.seen, 2) == together


class Unlike(Growing):
    """Has different data on each rank from the second epoch on."""

    def train_dataloader(self) -> Any:
        if self.trainer.current_epoch == 0:
            return super().train_dataloader()
        dataset = TensorDataset(*(one[: 20 + self.trainer.global_rank] for one in numbered().tensors))
        return DataLoader(dataset, batch_size=2)


class Broken(Growing):
    """Fails on one rank from the second epoch on."""

    def train_dataloader(self) -> Any:
        if self.trainer.current_epoch and self.trainer.global_rank == 1:
            raise OSError("no such file")
        return super().train_dataloader()


def _unlike() -> list[dict[str, str]]:
    found = []
    for data in (Unlike(), Broken()):
        with failing() as caught:
            fit = quiet(strategy="ddp", max_epochs=2, reload_dataloaders_every_n_epochs=1)
            fit.fit(Regression(), datamodule=data)
        found.append(caught)
    return found


def test_ranks_with_different_loaders_are_reported() -> None:  # L-07
    for unlike, broken in on_ranks(_unlike, 2, process_group=None, timeout=60):
        assert unlike["type"] == "DistributedError"
        assert "training samples: 20 on rank(s) [0]; 21 on rank(s) [1]" in unlike["text"]
        assert "no such file" in broken["text"]
