"""Reloaded loaders on two ranks: on all at once, and in resumed runs on as many ranks or fewer. L-07."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, failing, quiet, weights
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, DataModule
from worlds import on_ranks

SAMPLES = 30


def numbered(samples: int = SAMPLES) -> TensorDataset:
    """Samples that are identified by their last feature."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    x[:, -1] = torch.arange(SAMPLES) / SAMPLES
    return TensorDataset(x[:samples], x[:samples].sum(1, keepdim=True))


class Growing(DataModule):
    """Has batches of 2, 3 and 4 samples in epochs 0, 1 and 2."""

    def train_dataloader(self) -> Any:
        return DataLoader(numbered(), batch_size=2 + self.trainer.current_epoch, shuffle=True)


class Watching(Regression):
    """Records its samples by epoch, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.2))
        self.seen: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.joining:
            self.seen[self.current_epoch].append((batch[0][:, -1] * SAMPLES).round().int().tolist())
        return super().training_step(batch, batch_idx)


class SavesInMidEpoch(Callback):
    """Saves after the third batch of the second epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            trainer.defer_save(lambda: trainer.save_checkpoint(self.path))


def fit(strategy: str, ckpt_path: str | None = None, callbacks: Any = (), data: Any = None) -> Watching:
    module, options = Watching(), {"max_epochs": 3, "seed": 4, "reload_dataloaders_every_n_epochs": 1}
    run = quiet(strategy=strategy, callbacks=[*callbacks], **options)
    run.fit(module, datamodule=Growing() if data is None else data, ckpt_path=ckpt_path)
    return module


def _whole_and_resumed(path: str, strategy: str) -> Any:
    whole, resumed = fit(strategy, callbacks=[SavesInMidEpoch(path)]), fit(strategy, path)
    return weights(whole), weights(resumed), whole.seen, resumed.seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_uses_the_remaining_samples_also_on_fewer_ranks(strategy: str, tmp_path: Path) -> None:  # L-07
    ranks = on_ranks(_whole_and_resumed, 2, str(tmp_path / "saved"), strategy, process_group=None, timeout=100)
    for whole, resumed, seen, seen_after in ranks:
        assert torch.equal(whole, resumed)
        assert seen_after == {0: [], 1: seen[1][3:], 2: seen[2]}
        assert [len(samples) for samples in seen[1]][:-1] == [3] * 4
    if strategy == "fsdp":
        return
    alone = fit("single_device", str(tmp_path / "saved"))
    before = chain.from_iterable(samples for rank in ranks for samples in rank[2][1][:3])
    assert sorted([*before, *chain.from_iterable(alone.seen[1])]) == list(range(SAMPLES))
    assert {len(samples) for samples in alone.seen[1]} == {3}
    # The last epoch is the one that it would have been without the resume.
    together = chain.from_iterable(zip(*(rank[2][2] for rank in ranks), strict=True))
    assert [*chain.from_iterable(alone.seen[2])] == [*chain.from_iterable(together)]


class Unlike(Growing):
    """Has different data on each rank from the second epoch on."""

    def train_dataloader(self) -> Any:
        if self.trainer.current_epoch == 0:
            return super().train_dataloader()
        return DataLoader(numbered(20 + self.trainer.global_rank), batch_size=2)


class Broken(Growing):
    """Fails on one rank from the second epoch on."""

    def train_dataloader(self) -> Any:
        if self.trainer.current_epoch and self.trainer.global_rank == 1:
            raise OSError("no such file")
        return super().train_dataloader()


def _unlike() -> list[str]:
    texts = []
    for data in (Unlike(), Broken()):
        with failing() as caught:
            fit("ddp", data=data)
        texts.append(f"{caught['type']}: {caught['text']}")
    return texts


def test_ranks_with_different_loaders_are_reported() -> None:  # L-07
    for unlike, broken in on_ranks(_unlike, 2, process_group=None, timeout=60):
        assert unlike.startswith("DistributedError")
        assert "training samples: 20 on rank(s) [0]; 21 on rank(s) [1]" in unlike
        assert "no such file" in broken
