"""Settings that could have no effect, or that torch cannot apply, are refused or warned about when a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, Regression, fit, loader, regression
from small_modules import linear
from torch import nn

from captured_warnings import captured_warnings
from drivetrain import seed_everything

# Private: this test process is seeded, and must look as if it were not.
from drivetrain._engine import seeding
from drivetrain._runtime import seed
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.precision import FullPrecision


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (batch[0] * self.phase).abs().square().sum()


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
    module, reference = Complex(), Complex()
    reference.load_state_dict(module.state_dict())
    fit(tmp_path, gradient_clip_val=0.1).fit(module, regression())
    optimizer = reference.configure_optimizers()
    for batch in regression():  # Written by hand: the oracle has no complex parameters.
        optimizer.zero_grad()
        reference.training_step(batch, 0).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    for found, expected in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_an_algorithm_without_a_limit_is_refused_unless_it_is_read(tmp_path: Path) -> None:  # B-05
    def clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.read = gradient_clip_algorithm
        self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm)

    with pytest.raises(ConfigurationError, match="gradient_clip_algorithm='value' without gradient_clip_val"):
        fit(tmp_path, gradient_clip_algorithm="value").fit(Regression(), regression())
    reading: Any = linear(configure_gradient_clipping=clip)
    fit(tmp_path, gradient_clip_algorithm="value").fit(reading, regression())
    assert reading.read == "value"
    by_hand = linear(automatic_optimization=False, training_step=lambda self, batch: self.optimizers().step())
    fit(tmp_path, gradient_clip_algorithm="value").fit(by_hand, regression())
    fit(tmp_path, gradient_clip_algorithm="value", gradient_clip_val=0).fit(Regression(), regression())
    validating = linear(validation_step=lambda self, batch: None)
    fit(tmp_path, gradient_clip_algorithm="value").validate(validating, regression(), verbose=False)


@pytest.mark.parametrize(
    ("validates", "warnings", "options"),
    [
        (True, 1, {"max_epochs": 2}),
        (True, 1, {"max_epochs": 2, "val_check_interval": 0.5}),
        (True, 0, {"max_epochs": 3}),
        (True, 0, {"max_steps": 2, "max_epochs": -1}),
        (True, 0, {"limit_val_batches": 0}),
        (True, 0, {"fast_dev_run": True}),
        (True, 0, {"check_val_every_n_epoch": None, "val_check_interval": 2}),
        (False, 0, {}),
    ],
)
def test_a_run_that_never_validates_warns(
    tmp_path: Path, validates: bool, warnings: int, options: dict[str, Any]
) -> None:  # I-06
    module, validation = linear(validation_step=lambda self, batch: None), regression() if validates else None
    with captured_warnings() as lines:
        fit(tmp_path, **{"check_val_every_n_epoch": 3, **options}).fit(module, regression(), validation)
    found = [line for line in lines if "check_val_every_n_epoch" in line]
    assert len(found) == warnings
    assert all("=3 is more than max_epochs=2: this run never validates." in line for line in found)


class Line(Bare):
    def predict_step(self, batch: Any) -> None: ...


class Late(Line):
    """Builds its layer in the run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = torch.nn.Linear(2, 1)


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the process look as if no generator had been seeded."""
    with ProcessState(generators=True):
        random = torch.seed() >> 11 | 2**40
        torch.manual_seed(random)
        monkeypatch.setattr(seed, "_seed_at_import", random)
        monkeypatch.setattr(seed, "_last_seed", None)
        monkeypatch.setattr(seeding, "_reported_unseeded", False)
        yield


def test_a_module_built_before_the_seed_is_warned_about_once_unless_it_was_built_in_a_seeded_fork(
    unseeded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # I-18
    monkeypatch.setattr(seed, "_state_at_import", torch.get_rng_state())
    with captured_warnings() as lines:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = Line()
        fit(tmp_path, seed=7).fit(module, loader(4))
        assert lines == []
        fit(tmp_path, seed=7).fit(Line(), loader(4))
        fit(tmp_path, seed=7).fit(Line(), loader(4))
    (line,) = lines
    assert line.startswith("Fit(seed=7) seeds the run, but Line was built before the run with unseeded generators")
    assert "seed_everything(7)" in line
    assert "configure_model" in line


def test_no_module_is_warned_about_with_an_early_seed_or_without_one(unseeded: None, tmp_path: Path) -> None:  # I-18
    run = fit(tmp_path, seed=7)
    with captured_warnings() as lines:
        fit(tmp_path, seed=None).fit(Line(), loader(4))
        run.predict(Line(), loader(4))
        run.fit(Late(), loader(4))
        run.save_checkpoint(tmp_path / "saved")
        # The weights come from the checkpoint, of another class.
        fit(tmp_path, seed=7, max_epochs=2).fit(Line(), loader(4), ckpt_path=tmp_path / "saved", allow=("module",))
        state = torch.get_rng_state()
        seed_everything(1)
        torch.set_rng_state(state)  # as `fork_rng` does
        run.fit(Line(), loader(4))
    assert [line for line in lines if "are allowed" not in line] == []


def test_started_functions_know_how_their_caller_built_the_module(unseeded: None, tmp_path: Path) -> None:  # I-18
    # Their own generators give no indication: those of a fork server are never seeded.
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "launcher": "fork", "seed": 7}
    options["callbacks"] = Checkpoint(save_top_k=0)  # a logs folder requires a run folder
    trainer = fit(tmp_path, **options)
    trainer.fit(Line(), loader(4))
    assert sum(log.read_text().count("Fit(seed=7) seeds the run") for log in tmp_path.rglob("rank-*.log")) == 1
    seeding._reported_unseeded = False
    torch.manual_seed(1)
    trainer = fit(tmp_path / "again", **options)
    trainer.fit(Line(), loader(4))
    assert not [log for log in (tmp_path / "again").rglob("rank-*.log") if "seeds the run" in log.read_text()]
