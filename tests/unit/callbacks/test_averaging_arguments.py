"""Arguments of weight averaging, and which buffers are averaged; averages of weights: tests/distributed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit, train
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import Checkpoint, EMAWeightAveraging, LambdaCallback, WeightAveraging

DECAY = 0.8


def fit(*callbacks: Callback) -> Regression:
    """Train two epochs of two steps."""
    module = Regression()
    quiet_fit(max_epochs=2, callbacks=list(callbacks)).fit(module, loader(8))
    return module


def test_one_average_can_be_used_copied_and_pickled_after_a_run_and_two_in_one_are_refused() -> None:  # L-01
    with pytest.raises(ConfigurationError, match="EMAWeightAveraging and WeightAveraging in one run"):
        fit(EMAWeightAveraging(), WeightAveraging())
    averaging = EMAWeightAveraging(0.5)
    for _ in range(2):
        fit(averaging)
        assert averaging.updates == 4  # of the last run
    copy.deepcopy(averaging)
    assert pickle.loads(pickle.dumps(averaging)).updates == 4


def test_a_subclass_decides_when_to_update() -> None:  # L-01
    asked: list[tuple[int | None, int | None]] = []
    after: list[torch.Tensor] = []

    class AtEnds(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            asked.append((step_idx, epoch_idx))
            return epoch_idx is not None

    keep = LambdaCallback(on_train_epoch_end=lambda trainer, module: after.append(module.net.weight.detach().clone()))
    module = fit(AtEnds(), keep)
    assert asked == [(0, None), (1, None), (None, 0), (2, None), (3, None), (None, 1)]
    torch.testing.assert_close(module.net.weight.detach(), (after[0] + after[1]) / 2)


class Normed(Regression):
    """A spectrally normalized layer, a BatchNorm and a mask; keeps the buffers of each step and of the validation."""

    mask: torch.Tensor

    def __init__(self, normalize: Any = parametrizations.spectral_norm) -> None:
        super().__init__(lr=0.3)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(normalize(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 1))  # type: ignore[assignment]
        self.register_buffer("mask", torch.ones(4))
        self.trained: list[dict[str, torch.Tensor]] = []
        self.validated: dict[str, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss((batch[0] * self.mask, batch[1]))
        self.mask = 1 - self.mask
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append({name: buffer.clone() for name, buffer in self.named_buffers()})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated = {name: buffer.clone() for name, buffer in self.named_buffers()}


def average(root: Path, module: Normed, **options: Any) -> None:
    callbacks = [EMAWeightAveraging(DECAY), Checkpoint(root / "saved", save_last=True)]
    train(root, callbacks, module, loader(24), loader(24), **{"max_epochs": 2, **options})


@pytest.mark.parametrize("normalize", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_only_running_statistics_are_averaged(normalize: Any, tmp_path: Path) -> None:  # S-14
    module = Normed(normalize)
    average(tmp_path, module)
    last = module.trained[-1]
    mean, *later = [buffers["net.1.running_mean"] for buffers in module.trained]
    for value in later:
        mean = mean.lerp(value, 1 - DECAY)
    for found in (module.validated, dict(module.named_buffers())):
        torch.testing.assert_close(found["net.1.running_mean"], mean)
        for name in last.keys() - {"net.1.running_mean", "net.1.running_var"}:
            assert torch.equal(found[name], last[name]), name
    vectors = [value for name, value in module.validated.items() if name.endswith(("_u", "_v"))]
    assert [float(vector.norm()) for vector in vectors] == pytest.approx([1.0, 1.0])


def test_a_resumed_run_has_the_averages_and_buffers_of_the_whole_run(tmp_path: Path) -> None:  # S-14
    whole, resumed = Normed(), Normed()
    average(tmp_path / "whole", whole)
    average(tmp_path / "parts", Normed(), max_epochs=1)
    average(tmp_path / "parts", resumed, ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
