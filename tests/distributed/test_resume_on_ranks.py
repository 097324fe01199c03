"""Resumed runs on several ranks: bit for bit on as many, sample for sample on more or fewer.

Rows F-02, F-08, B-10, B-18, Q-04, S-01, S-02.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from small_runs import FEATURES, STRATEGIES, Regression, failing, loader, quiet, seeded, trained, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain.callbacks import Checkpoint
from drivetrain.data import CombinedLoader
from worlds import on_ranks

SAMPLES = 53


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read; the first number of a sample is its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(FEATURES) + random.random()])


class Stream(IterableDataset[Any]):
    """Each rank's own part, with different lengths, in a random order."""

    def __iter__(self) -> Any:
        rank = dist.get_rank()
        for index in torch.randperm(20 + 9 * rank).tolist():
            yield torch.cat([torch.tensor([float(index + 100 * rank)]), torch.rand(FEATURES)])


class Drawing(Regression):
    """Uses dropout, weights of micro-batches that only their rank knows, and values logged over the epoch."""

    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.net = seeded(
            lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        )
        self.mean = torchmetrics.MeanMetric()
        self.seen: list[tuple[int, int]] = []
        self.losses: list[float] = []
        if weighs:
            self.batch_weight = lambda batch: float(batch[:, 0].sum()) + 1  # type: ignore[method-assign]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[:, 1:]) - 0.01 * batch[:, :1]).square().mean()
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
    data: Any = Stream() if kind == "stream" else Augmented()
    sampling: dict[str, Any] = (
        {} if kind == "stream" else {"shuffle": True, "num_workers": 2 if kind == "workers" else 0}
    )
    saver = Checkpoint(folder, every_n_train_steps=1, save_top_k=-1, save_async=options.pop("in_background", False))
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "seed": 3, "default_root_dir": folder, **options}
    trainer = quiet(strategy=STRATEGIES[strategy](), callbacks=saver, **settings)
    trainer.fit(module, DataLoader(data, batch_size, **sampling), ckpt_path=start)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module), module.losses, module.seen, metrics, trainer.samples_seen


def assert_end_of(found: Any, whole: Any, where: object) -> None:
    """Assert that a resumed run is the end of the whole run, bit for bit."""
    assert torch.equal(found[0], whole[0]), where
    assert found[1] == whole[1][-len(found[1]) :], where
    assert found[2] == whole[2][-len(found[2]) :], where
    assert found[3:] == whole[3:], where


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
            assert_end_of(found, whole, f"rank {rank} from {stop}")


def _once(folder: Path, start: Path | None, batch_size: int, max_steps: int = -1) -> Any:
    options = {} if max_steps < 0 else {"max_steps": max_steps, "max_epochs": -1}
    return _fit(folder, "ddp", start, "dealt", batch_size, **options)


def test_on_other_numbers_of_ranks_every_sample_is_used_once_per_epoch(tmp_path: Path) -> None:
    # F-02: 2 x 3, then 4 x 2, then 3 x 4, stopping in the middle of an epoch each time
    first = on_ranks(_once, 2, tmp_path / "a", None, 3, 2)
    second = on_ranks(_once, 4, tmp_path / "b", tmp_path / "a" / "epoch=0-step=2", 2, 3)
    third = on_ranks(_once, 3, tmp_path / "c", tmp_path / "b" / "epoch=0-step=3", 4)
    seen = [sample for run in (*first, *second, *third) for sample in run[2]]
    assert sorted(seen) == [(epoch, sample) for epoch in range(2) for sample in range(SAMPLES)]
    assert {run[4] for run in third} == {2 * SAMPLES}
    # The second epoch is a regular one, in its usual order.
    for found, expected in zip(third, on_ranks(_once, 3, tmp_path / "d", None, 4), strict=True):
        assert [sample for sample in found[2] if sample[0] == 1] == [sample for sample in expected[2] if sample[0] == 1]
    # An epoch's mean is over all of its samples, regardless of their ranks.
    assert third[0][3]["loss_epoch"] == pytest.approx(third[0][3]["mean"], rel=0.2)


def test_a_second_resume_within_such_an_epoch_is_exact(tmp_path: Path) -> None:
    # F-02. On two ranks: with three, DDP's buckets, which differ between its first step and later ones, set the
    # order in which gloo adds, and the last bit may differ (1.5e-8 here, depending on the seed).
    on_ranks(_once, 3, tmp_path / "a", None, 2, 2)
    whole = on_ranks(_once, 2, tmp_path / "b", tmp_path / "a" / "epoch=0-step=2", 3)
    again = on_ranks(_once, 2, tmp_path / "c", tmp_path / "b" / "epoch=0-step=4", 3)
    for rank, (found, expected) in enumerate(zip(again, whole, strict=True)):
        assert_end_of(found, expected, rank)


class Stateful(IterableDataset[Any]):
    """Each rank's own part, which goes on from the position that is loaded."""

    def __init__(self, rank: int) -> None:
        self.rank, self.start, self.done = rank, 0, 0

    def __iter__(self) -> Any:
        self.done, self.start = self.start, 0
        while self.done < 9:
            self.done += 1
            yield torch.cat([torch.tensor([100.0 * self.rank + self.done]), torch.ones(FEATURES)])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class Pairs(Drawing):
    """Trains on the first batch of a pair, and records the first samples of both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch[1] is not None and not self.trainer.joining:
            self.seen.append((int(batch[0][0, 0]), int(batch[1][0, 0])))
        return super().training_step(batch[0], batch_idx)


def _fit_pairs(folder: Path, start: Path | None) -> Any:
    loaders = [DataLoader(Stateful(dist.get_rank()), 2), DataLoader(Augmented(), 6, shuffle=True)]
    module, saver = Pairs(), Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "seed": 3, "default_root_dir": folder}
    trainer = quiet(strategy="ddp", callbacks=saver, **options)
    trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"), ckpt_path=start)
    return module.seen


def _pairs_whole_and_resumed(folder: Path) -> Any:
    whole = _fit_pairs(folder / "whole", None)
    stops = ("epoch=0-step=1", "epoch=0-step=2", "epoch=1-step=5")
    return whole, [_fit_pairs(folder / f"from {stop}", folder / "whole" / stop) for stop in stops]


def test_pairs_with_a_stateful_loader_stay_pairs_on_every_rank(tmp_path: Path) -> None:  # S-02
    for whole, resumed in on_ranks(_pairs_whole_and_resumed, 2, tmp_path):
        for found in resumed:
            assert found
            assert found == whole[-len(found) :]


class SavesAtTheEnd(Regression):
    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def _save_after(strategy: str, folder: str) -> tuple[torch.Tensor, str]:
    module, trainer = SavesAtTheEnd(f"{folder}/within"), quiet(strategy=strategy)
    trainer.fit(module, loader(32, 4))
    found = weights(module)
    with failing() as refused:
        trainer.save_checkpoint(f"{folder}/whole")
    trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    resumed = SavesAtTheEnd(f"{folder}/again")
    trained(resumed, loader(32, 4), strategy=strategy, max_epochs=2, ckpt_path=module.path)
    return found, refused["text"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_a_save_after_a_run_of_two_ranks_names_the_way_out(strategy: str, tmp_path: Path) -> None:
    # S-01: a checkpoint holds the state of one step, of all ranks
    for found, refused in on_ranks(_save_after, 2, strategy, str(tmp_path)):
        assert "needs the state of every rank" in refused
        assert "on_train_end, or with weights_only=True" in refused
        again = Regression.load_from_checkpoint(tmp_path / "weights", strict=False)
        torch.testing.assert_close(weights(again), found)
    assert not (tmp_path / "whole").exists()


class SavesWithinAStep(Regression):
    """Has running statistics, and saves within its third step."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.net.append(torch.nn.BatchNorm1d(1))
        self.path = path
        self.backwards = 0

    def on_after_backward(self) -> None:
        self.backwards += 1
        if self.path and self.backwards == 3:
            self.trainer.save_checkpoint(self.path)


def _save_within(strategy: str, path: str) -> list[torch.Tensor]:
    found = []
    for module, ckpt_path in ((SavesWithinAStep(), None), (SavesWithinAStep(path), None), (SavesWithinAStep(), path)):
        quiet(strategy=strategy).fit(module, loader(48, 4), ckpt_path=ckpt_path)
        found.append(torch.cat([value.flatten().double() for value in module.state_dict().values()]))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_save_within_a_step_resumes_exactly_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    # S-01
    for whole, saving, resumed in on_ranks(_save_within, 2, strategy, str(tmp_path / "saved")):
        torch.testing.assert_close(saving, whole, atol=0, rtol=0)
        torch.testing.assert_close(resumed, whole, atol=1e-7, rtol=0)


class Adam(Regression):
    def __init__(self, grouped: bool, **options: Any) -> None:
        super().__init__()
        self.grouped, self.options = grouped, options

    def configure_optimizers(self) -> Any:
        layers = [self.net[0], self.net[2]] if self.grouped else [self.net]
        groups = [{"params": list(layer.parameters())} for layer in layers]
        optimizer = torch.optim.AdamW(groups, **{"lr": 0.01, **self.options})
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class RecordsRates(Callback):
    """Saves after the first epoch, and records the learning rate of each step."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0 and self.path:
            trainer.save_checkpoint(self.path)


def fit_adam(
    strategy: str, grouped: bool = True, resume: str = "", allow: Any = (), path: str = "", **options: Any
) -> Any:
    """Return the error, the learning rates of the steps, and the warnings."""
    callback = RecordsRates(path)
    trainer = quiet(strategy=STRATEGIES[strategy](), max_epochs=2, callbacks=[callback], seed=1)
    with captured_warnings() as warned, failing() as caught:
        trainer.fit(Adam(grouped, **options), loader(16, 4), ckpt_path=resume, allow=allow)
    return caught["text"], callback.rates, [text for text in warned if "goes on" in text]


def _save_and_resume(before: str, after: str, path: str) -> list[Any]:
    assert fit_adam(before, path=path)[0] == ""
    changes: list[dict[str, Any]] = [{"amsgrad": True}, {"grouped": False}, {"lr": 0.32}]
    changes.append({"grouped": False, "allow": "optimizer", "lr": 0.32})
    return [fit_adam(after, resume=path, **options) for options in changes]


@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("ddp", "zero 2"), ("zero 3", "fsdp")])
def test_settings_are_compared_alike_under_every_strategy(before: str, after: str, tmp_path: Path) -> None:
    found = on_ranks(_save_and_resume, 2, before, after, str(tmp_path / "saved"), timeout=170)
    for rank, (amsgrad, merged, rate, allowed) in enumerate(found):
        assert "amsgrad=False in group 0 of AdamW, and this one amsgrad=True" in amsgrad[0]
        assert "'net.2.weight', 'net.2.bias' in group 1 of AdamW, and this one in group 0" in merged[0]
        assert rate[:2] == ("", pytest.approx([0.01 * 0.5**step for step in (2, 3)]))
        assert len(rate[2]) == (rank == 0)
        assert all("initial_lr=0.01 in group 0 of AdamW, not 0.32" in line for line in rate[2])
        assert allowed == ("", pytest.approx([0.32, 0.16]), [])
