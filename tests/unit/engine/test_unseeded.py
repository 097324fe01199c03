"""The warning about a module that was built before its run's seed, with unseeded generators. Row I-18."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, fit, loader

from captured_warnings import captured_warnings
from drivetrain import seed_everything

# Private: this test process is seeded, and must look as if it were not.
from drivetrain._engine import seeding
from drivetrain._runtime import seed
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callbacks import Checkpoint


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


@pytest.fixture(autouse=True)
def _unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the process look as if no generator had been seeded."""
    with ProcessState(generators=True):
        random = torch.seed() >> 11 | 2**40
        torch.manual_seed(random)
        monkeypatch.setattr(seed, "_seed_at_import", random)
        monkeypatch.setattr(seed, "_last_seed", None)
        monkeypatch.setattr(seeding, "_reported_unseeded", False)
        yield


def test_the_warning_is_logged_once(tmp_path: Path) -> None:  # I-18
    with captured_warnings() as lines:
        fit(tmp_path, seed=7).fit(Line(), loader(4))
        fit(tmp_path, seed=7).fit(Line(), loader(4))
    (line,) = lines
    assert line.startswith("Fit(seed=7) seeds the run, but Line was built before the run with unseeded generators")
    assert "seed_everything(7)" in line
    assert "configure_model" in line


def test_no_warning_with_an_early_seed_or_without_one(tmp_path: Path) -> None:  # I-18
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


def test_draws_from_a_fork_are_told_from_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # I-18
    monkeypatch.setattr(seed, "_state_at_import", torch.get_rng_state())
    with captured_warnings() as lines:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = Line()
        fit(tmp_path, seed=7).fit(module, loader(4))
        assert lines == []
        fit(tmp_path, seed=7).fit(Line(), loader(4))
    assert len(lines) == 1


def test_started_functions_know_how_their_caller_built_the_module(tmp_path: Path) -> None:  # I-18
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
