"""Loaders that overwrite the previous batch (I-09), and steps that overwrite the previous step's outputs, as CUDA
graphs do (mode="reduce-overhead").
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from drivetrain import Fit
from drivetrain.callbacks import LossSpikeGuard, NonFiniteGuard
from drivetrain.data import CombinedLoader
from drivetrain.loggers import CSVLogger
from drivetrain.testing import requires_cuda

FEATURES, SAMPLES, SIZE = 3, 22, 4


def data() -> torch.Tensor:
    """Return inputs, and targets in the last column."""
    return torch.randn(SAMPLES, FEATURES + 1, generator=torch.Generator().manual_seed(1))


class OneBuffer:
    def __init__(self) -> None:
        self.buffer = torch.empty(SIZE, FEATURES + 1)

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.stack([row for (row,) in samples], out=self.buffer[: len(samples)])


class OneArray:
    """Yields the same dict over one numpy array, which it overwrites without torch's knowledge."""

    def __init__(self, pinned: bool = False, device: str = "cpu") -> None:
        self.tensor = torch.empty(SIZE, FEATURES + 1, pin_memory=pinned, device=device)
        self.array: Any = self.tensor.numpy() if device == "cpu" else self.tensor

    def __iter__(self) -> Iterator[Any]:
        batch: dict[str, torch.Tensor] = {}
        for part in data().split(SIZE):
            self.array[: len(part)] = part
            batch["rows"] = self.tensor[: len(part)]
            yield batch


class Alternating:
    """Fills one of two buffers while the other is in use, as a loader that prefetches does."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffers = [torch.empty(SIZE, FEATURES + 1), torch.empty(SIZE, FEATURES + 1)]
        parts = list(data().split(SIZE))
        buffers[0].copy_(parts[0])
        for index, part in enumerate(parts):
            if index + 1 < len(parts):
                coming = parts[index + 1]
                buffers[(index + 1) % 2][: len(coming)] = coming
            yield buffers[index % 2][: len(part)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from OneArray()


class UnknownSampler(BatchSampler):
    """A user's batch sampler, whose batches are not sharded."""


def collated(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data()), collate_fn=OneBuffer(), **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "collated": lambda: collated(batch_size=SIZE),
    "a sampler of batches": lambda: collated(batch_sampler=UnknownSampler(SequentialSampler(data()), SIZE, False)),
    "an iterable": OneArray,
    "an iterable data set": lambda: DataLoader(Stream(), batch_size=None),
    "two buffers": Alternating,
    "several": lambda: CombinedLoader({"one": OneArray(), "other": Alternating()}, "max_size"),
}


class OfRows(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.addresses: list[int] = []

    def rows(self, batch: Any) -> torch.Tensor:
        while isinstance(batch, dict):
            batch = batch["rows"] if "rows" in batch else batch["one"]
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.rows(batch)
        self.addresses.append(rows.data_ptr())
        return self.loss((rows[:, :FEATURES], rows[:, FEATURES:]))


class Weighted(OfRows):
    def batch_weight(self, batch: Any) -> Any:
        return len(self.rows(batch))


class EvaluatesAgain(OfRows):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def fitted(module: OfRows, loader: Any, window: int, **settings: Any) -> torch.Tensor:
    options: dict[str, Any] = {"accelerator": "cpu", "barebones": True, "max_epochs": 2, **settings}
    Fit(accumulate_grad_batches=window, **options).fit(module, loader)
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu()


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("window", "module"), [(1, EvaluatesAgain), (3, OfRows), (3, Weighted), (3, EvaluatesAgain)])
def test_a_loader_that_reuses_memory_trains_as_batches_of_their_own(kind: str, window: int, module: Any) -> None:
    # I-09: batches that torch collates, and lists of batches, are not copied
    batches, reference = list(data().split(SIZE)), module()
    expected = fitted(reference, batches, window)
    assert set(reference.addresses) == {batch.data_ptr() for batch in batches}
    trained = fitted(module(), LOADERS[kind](), window)
    torch.testing.assert_close(trained, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.cuda
@requires_cuda()
@pytest.mark.parametrize("options", [{"pinned": True}, {"device": "cuda"}])
@pytest.mark.parametrize("window", [1, 3])
def test_memory_that_a_device_still_reads_is_not_overwritten(options: dict[str, Any], window: int) -> None:  # I-09
    trained = fitted(OfRows(), OneArray(**options), window, accelerator="cuda", devices=1)
    expected = fitted(OfRows(), list(data().split(SIZE)), window)
    torch.testing.assert_close(trained, expected, atol=1e-5, rtol=1e-4)


_outputs = torch.zeros(())  # overwritten by every replay


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return _outputs.copy_(value).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Replaying(Regression):
    def __init__(self, replays: bool = True) -> None:
        super().__init__(lr=0.1)
        self.replays = replays

    def output(self, value: torch.Tensor) -> torch.Tensor:
        replayed: torch.Tensor = _Replayed.apply(value) if self.replays else value
        return replayed

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.output(self.layer(batch[0]).square().mean())
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.output(self.layer(batch[0]).mean()))
        self.output(torch.tensor(float("nan")))  # another output in the same memory

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.output(self.layer(batch[0]).sum())


class NeverFinite(Replaying):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.output(self.layer(batch[0]).mean() * float("inf"))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.output(torch.tensor(1.0))


def _run(folder: Path, replays: bool) -> tuple[list[dict[str, str]], list[float]]:
    loader = regression(40)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 2, "val_check_interval": 5}
    guards = [LossSpikeGuard(every_n_steps=3), NonFiniteGuard(every_n_steps=3)]
    trainer = fit(folder, logger=CSVLogger(folder), callbacks=guards, seed=None, **options)
    module = Replaying(replays)
    trainer.fit(module, loader, loader)
    with (Path(str(trainer.log_dir)) / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    predictions: Any = trainer.predict(module, loader)
    return table, [float(one) for one in predictions]


def test_logged_and_predicted_values_are_those_of_their_step(tmp_path: Path, caplog: Any) -> None:  # O-04
    replayed, plain = _run(tmp_path / "replayed", replays=True), _run(tmp_path / "plain", replays=False)
    assert replayed == plain
    assert len({row["loss_step"] for row in plain[0] if row["loss_step"]}) >= 5
    assert len(set(plain[1])) == 10
    assert "the module no longer learns" not in caplog.text


def test_a_never_finite_loss_is_reported_although_validation_overwrote_it(tmp_path: Path, caplog: Any) -> None:
    fit(tmp_path).fit(NeverFinite(), regression(8), regression(8))
    assert "the module no longer learns" in caplog.text
