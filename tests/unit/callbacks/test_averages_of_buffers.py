"""Which buffers are averaged: running statistics, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging

DECAY = 0.8


class Net(TrainModule):
    """A spectrally normalized layer, a BatchNorm, a mask and a counter; keeps the buffers that a validation used."""

    mask: torch.Tensor

    def __init__(self, normalize: Any = parametrizations.spectral_norm) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(normalize(nn.Linear(6, 6)), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.register_buffer("mask", torch.ones(6))

    def training_step(self, batch: Any) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0] * self.mask), batch[1])
        self.mask = 1 - self.mask
        return loss

    def validation_step(self, batch: Any) -> None:
        self.validated = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Trained(Callback):
    """Records the buffers after each step."""

    def __init__(self) -> None:
        self.buffers: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.buffers.append({name: buffer.clone() for name, buffer in module.named_buffers()})


def _data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(24, 6, generator=generator), torch.randn(24, 1, generator=generator))
    return DataLoader(rows, batch_size=4)


def _fit(module: Net, folder: Path, *callbacks: Callback, ckpt_path: Any = None, max_epochs: int = 2) -> None:
    fit = Fit(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=max_epochs,
        default_root_dir=folder,
        callbacks=[EMAWeightAveraging(DECAY), Checkpoint(folder / "saved", save_last=True), *callbacks],
    )
    fit.fit(module, _data(), _data(), ckpt_path=ckpt_path)


@pytest.mark.parametrize("normalize", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_only_running_statistics_are_averaged(normalize: Any, tmp_path: Path) -> None:  # S-14
    module, trained = Net(normalize), Trained()
    _fit(module, tmp_path, trained)
    last = trained.buffers[-1]
    mean, *later = [buffers["net.1.running_mean"] for buffers in trained.buffers]
    for value in later:
        mean = mean.lerp(value, 1 - DECAY)
    for found in (module.validated, dict(module.named_buffers())):
        torch.testing.assert_close(found["net.1.running_mean"], mean)
        for name in last.keys() - {"net.1.running_mean", "net.1.running_var"}:
            assert torch.equal(found[name], last[name]), name
    vectors = [value for name, value in module.validated.items() if name.endswith(("_u", "_v"))]
    assert len(vectors) == 2
    for vector in vectors:
        torch.testing.assert_close(vector.norm(), torch.ones(()))


def test_a_resumed_run_has_the_averages_and_buffers_of_the_whole_run(tmp_path: Path) -> None:  # S-14
    whole, first, resumed = Net(), Net(), Net()
    _fit(whole, tmp_path / "whole")
    _fit(first, tmp_path / "parts", max_epochs=1)
    _fit(resumed, tmp_path / "parts", ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
