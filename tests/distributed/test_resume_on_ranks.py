"""Resumed runs on several ranks: bit for bit on as many, sample for sample on more or fewer. See the programs too."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from small_runs import FEATURES, STRATEGIES, Regression, SaveAt, data, each, failing, loader, quiet, trained, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import DataModule
from drivetrain.callbacks import Checkpoint, LambdaCallback
from worlds import on_ranks

SAMPLES = 53


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read; the first number of a sample is its index."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(FEATURES) + random.random()])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        rank = dist.get_rank()
        for index in torch.randperm(20 + 9 * rank).tolist():
            yield torch.cat([torch.tensor([float(index + 100 * rank)]), torch.rand(FEATURES)])


class Drawing(Regression):
    """Uses dropout, weights of micro-batches that only their rank knows, and values logged over the epoch."""

    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.2))
        self.mean = torchmetrics.MeanMetric()
        self.seen: list[tuple[int, int]] = []
        self.losses: list[float] = []
        if weighs:
            self.batch_weight = lambda batch: float(batch[:, 0].sum()) + 1  # type: ignore[method-assign]

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[:, 1:]) - 0.01 * batch[:, :1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.trainer.joining:
            self.seen += [(self.current_epoch, int(number)) for number in batch[:, 0]]
            self.losses.append(loss.item())
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _fit(folder: Path, strategy: str, start: Path | None, kind: str, batch_size: int = 3, **options: Any) -> Any:
    module = Drawing(weighs=kind == "weighed")
    samples: Any = Stream() if kind == "stream" else Augmented()
    sampling: dict[str, Any] = (
        {} if kind == "stream" else {"shuffle": True, "num_workers": 2 if kind == "workers" else 0}
    )
    saver = Checkpoint(folder, every_n_train_steps=1, save_top_k=-1, save_async=options.pop("in_background", False))
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "seed": 3, "default_root_dir": folder, **options}
    trainer = quiet(strategy=STRATEGIES[strategy](), callbacks=saver, **settings)
    trainer.fit(module, DataLoader(samples, batch_size, **sampling), ckpt_path=start)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module), module.losses, module.seen, metrics, trainer.samples_seen


STOPS = ["epoch=0-step=4", "epoch=1-step=7"]


def _whole_and_resumed(folder: Path, strategy: str, kind: str, in_background: bool) -> Any:
    whole = _fit(folder / "whole", strategy, None, kind, in_background=in_background)
    return whole, [_fit(folder / f"from {stop}", strategy, folder / "whole" / stop, kind) for stop in STOPS]


@pytest.mark.parametrize(
    ("strategy", "kind", "in_background"),
    [
        ("ddp", "weighed", True),
        ("ddp", "stream", False),
        ("ddp", "workers", False),
        ("fsdp", "weighed", True),
        ("zero 1", "dealt", True),
        ("zero 3", "dealt", False),
    ],
)
def test_a_run_resumes_bit_for_bit_on_as_many_ranks(
    strategy: str, kind: str, in_background: bool, tmp_path: Path
) -> None:  # F-02, F-08, B-10, B-18: also with prefetched batches and asynchronous saves
    for rank, (whole, resumed) in enumerate(on_ranks(_whole_and_resumed, 2, tmp_path, strategy, kind, in_background)):
        for stop, found in zip(STOPS, resumed, strict=True):
            for resumed_values, values in zip(found[1:3], whole[1:3], strict=True):
                assert resumed_values == values[-len(resumed_values) :], (rank, stop)
            assert torch.equal(found[0], whole[0]), (rank, stop)
            assert found[3:] == whole[3:], (rank, stop)


def _once(folder: Path, start: Path | None, batch_size: int, max_steps: int = -1) -> Any:
    options = {} if max_steps < 0 else {"max_steps": max_steps, "max_epochs": -1}
    return _fit(folder, "ddp", start, "dealt", batch_size, **options)


def test_on_other_numbers_of_ranks_every_sample_is_used_once_per_epoch(tmp_path: Path) -> None:
    # F-02: 2 x 3, then 4 x 2, then 3 x 4, stopping in the middle of an epoch each time
    first = on_ranks(_once, 2, tmp_path / "a", None, 3, 2)
    second = on_ranks(_once, 4, tmp_path / "b", tmp_path / "a" / "epoch=0-step=2", 2, 3)
    resumed_and_whole = (tmp_path / "c", tmp_path / "b" / "epoch=0-step=3", 4), (tmp_path / "d", None, 4)
    third, whole = zip(*on_ranks(each, 3, _once, *resumed_and_whole), strict=True)
    seen = [sample for run in (*first, *second, *third) for sample in run[2]]
    assert sorted(seen) == [(epoch, sample) for epoch in range(2) for sample in range(SAMPLES)]
    assert {run[4] for run in third} == {2 * SAMPLES}
    # The second epoch is a regular one, in its usual order.
    for found, expected in zip(third, whole, strict=True):
        assert [sample for sample in found[2] if sample[0] == 1] == [sample for sample in expected[2] if sample[0] == 1]
    # An epoch's mean is over all of its samples, regardless of their ranks.
    assert third[0][3]["loss_epoch"] == pytest.approx(third[0][3]["mean"], rel=0.2)


def _save_after(strategy: str, folder: str) -> tuple[torch.Tensor, str]:
    within = f"{folder}/within"
    saves = LambdaCallback(on_train_end=lambda trainer, module: trainer.save_checkpoint(within))
    module, trainer = Regression(), quiet(strategy=strategy, callbacks=saves)
    trainer.fit(module, loader(32, 4))
    found = weights(module)
    with failing() as refused:
        trainer.save_checkpoint(f"{folder}/whole")
    trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    trained(Regression(), loader(32, 4), strategy=strategy, max_epochs=2, ckpt_path=within)
    return found, refused["text"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_a_save_after_a_run_of_two_ranks_names_the_way_out(strategy: str, tmp_path: Path) -> None:  # S-01
    for found, refused in on_ranks(_save_after, 2, strategy, str(tmp_path)):
        assert "needs the state of every rank" in refused
        assert "on_train_end, or with weights_only=True" in refused
        again = Regression.load_from_checkpoint(tmp_path / "weights")
        torch.testing.assert_close(weights(again), found)
    assert not (tmp_path / "whole").exists()


class Growing(DataModule):
    def train_dataloader(self) -> Any:
        return loader(30, 2 + self.trainer.current_epoch, shuffle=True)


class Watching(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.2))
        self.seen: dict[int, list[list[float]]] = {0: [], 1: [], 2: []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.joining:
            self.seen[self.current_epoch].append(batch[0][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def fit_reloading(strategy: str, path: str | None = None, callbacks: Any = ()) -> Watching:
    module, options = Watching(), {"max_epochs": 3, "seed": 4, "reload_dataloaders_every_n_epochs": 1}
    run = quiet(strategy=strategy, callbacks=[*callbacks], **options)
    run.fit(module, datamodule=Growing(), ckpt_path=path)
    return module


def _reloading_and_resumed(path: str, strategy: str) -> Any:
    whole, resumed = fit_reloading(strategy, callbacks=[SaveAt(11, path)]), fit_reloading(strategy, path)
    return weights(whole), weights(resumed), whole.seen, resumed.seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_reloaded_loaders_resume_with_the_remaining_samples(strategy: str, tmp_path: Path) -> None:  # L-07
    path = str(tmp_path / "saved")
    ranks = on_ranks(_reloading_and_resumed, 2, path, strategy, process_group=None, timeout=100)
    for whole, resumed, seen, seen_after in ranks:
        assert torch.equal(whole, resumed)
        assert seen_after == {0: [], 1: seen[1][3:], 2: seen[2]}
        assert [len(samples) for samples in seen[1]][:-1] == [3] * 4
    alone = fit_reloading("single_device", path).seen  # on fewer ranks
    before = chain.from_iterable(samples for rank in ranks for samples in rank[2][1][:3])
    assert sorted([*before, *chain.from_iterable(alone[1])]) == sorted(data(30).tensors[0][:, 0].tolist())
    assert {len(samples) for samples in alone[1]} == {3}
    # The last epoch is the one that it would have been without the resume.
    together = chain.from_iterable(zip(*(rank[2][2] for rank in ranks), strict=True))
    assert [*chain.from_iterable(alone[2])] == [*chain.from_iterable(together)]
