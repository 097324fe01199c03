"""Settings that could have no effect, or that torch cannot apply, are refused or warned about when a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import fit, regression
from torch import nn

from captured_warnings import captured_warnings
from drivetrain import TrainModule
from drivetrain.errors import ConfigurationError
from drivetrain.precision import FullPrecision


class Linear(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> Any:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Complex(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def training_step(self, batch: Any) -> Any:
        return (self.layer(batch[0]) - batch[1]).square().mean() + (batch[0] * self.phase).abs().square().sum()


class OwnClipping(Linear):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.read = gradient_clip_algorithm
        self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm)


class Manual(Linear):
    automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        self.clip_gradients(optimizer, 0.1, self.trainer.gradient_clip_algorithm)
        optimizer.step()


def test_clipping_by_value_is_refused_for_complex_parameters(tmp_path: Path) -> None:  # B-05
    with pytest.raises(ConfigurationError, match=r"gradient_clip_algorithm='value' with 'phase'.*complex64") as caught:
        fit(tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(Complex(), regression())
    assert "gradient_clip_algorithm='norm'" in caught.value.fix
    frozen = Complex()
    frozen.phase.requires_grad_(False)
    fit(tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(frozen, regression())


def test_a_complex_gradient_that_is_clipped_by_value_is_refused() -> None:  # B-05
    module = Complex()
    module.phase.grad = torch.ones(3, dtype=torch.complex64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"a gradient of dtype torch\.complex64"):
        FullPrecision().clip_gradients([optimizer], 0.1, "value")


def test_clipping_by_norm_treats_complex_gradients_as_torch_does(tmp_path: Path) -> None:  # B-05
    modules = [Complex(), Complex()]
    modules[1].load_state_dict(modules[0].state_dict())
    fit(tmp_path, gradient_clip_val=0.1).fit(modules[0], regression())
    optimizer = modules[1].configure_optimizers()
    for batch in regression():
        optimizer.zero_grad()
        modules[1].training_step(batch).backward()
        nn.utils.clip_grad_norm_(modules[1].parameters(), 0.1)
        optimizer.step()
    for found, expected in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(found, expected)


def test_an_algorithm_without_a_limit_is_refused(tmp_path: Path) -> None:  # B-05
    with pytest.raises(ConfigurationError, match="gradient_clip_algorithm='value' without gradient_clip_val"):
        fit(tmp_path, gradient_clip_algorithm="value").fit(Linear(), regression())


def test_an_algorithm_that_is_read_or_switched_off_is_accepted(tmp_path: Path) -> None:  # B-05
    own = OwnClipping()
    fit(tmp_path, gradient_clip_algorithm="value").fit(own, regression())
    assert own.read == "value"
    fit(tmp_path, gradient_clip_algorithm="value").fit(Manual(), regression())
    fit(tmp_path, gradient_clip_algorithm="value", gradient_clip_val=0).fit(Linear(), regression())
    fit(tmp_path, gradient_clip_algorithm="value").validate(Linear(), regression(), verbose=False)


def _warnings(tmp_path: Path, validation: Any, **options: Any) -> list[str]:
    with captured_warnings() as lines:
        fit(tmp_path, **options).fit(Linear(), regression(), validation)
    return [line for line in lines if "check_val_every_n_epoch" in line]


def test_a_run_that_never_validates_warns(tmp_path: Path) -> None:  # I-06
    (line,) = _warnings(tmp_path, regression(), max_epochs=2, check_val_every_n_epoch=3)
    assert "check_val_every_n_epoch=3 is more than max_epochs=2: this run never validates." in line
    assert len(_warnings(tmp_path, regression(), max_epochs=2, check_val_every_n_epoch=3, val_check_interval=0.5)) == 1
    for options in (
        {"max_epochs": 3, "check_val_every_n_epoch": 3},
        {"max_steps": 2, "max_epochs": -1, "check_val_every_n_epoch": 3},
        {"max_epochs": 1, "check_val_every_n_epoch": 3, "limit_val_batches": 0},
        {"max_epochs": 1, "check_val_every_n_epoch": 3, "fast_dev_run": True},
        {"max_epochs": 1, "check_val_every_n_epoch": None, "val_check_interval": 2},
    ):
        assert _warnings(tmp_path, regression(), **options) == []
    assert _warnings(tmp_path, None, max_epochs=1, check_val_every_n_epoch=3) == []
