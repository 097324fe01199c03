"""The warning about a module that was built before its run's seed, with unseeded generators. Row I-18."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import fit, loader

from captured_warnings import captured_warnings
from drivetrain import TrainModule, seed_everything

# Private: this test process is seeded, and must look as if it were not.
from drivetrain._engine import seeding
from drivetrain._runtime import seed
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callbacks import Checkpoint


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def predict_step(self, batch: Any) -> Any:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Late(Line):
    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Linear(2, 1)


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
    with captured_warnings() as lines:
        fit(tmp_path, seed=None).fit(Line(), loader(4))
        fit(tmp_path, seed=7).fit(Late(), loader(4))
        fit(tmp_path, seed=7).predict(Line(), loader(4))
        state = torch.get_rng_state()
        seed_everything(1)
        torch.set_rng_state(state)  # as `fork_rng` does
        fit(tmp_path, seed=7).fit(Line(), loader(4))
    assert lines == []


def test_no_warning_for_draws_from_a_seeded_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # I-18
    monkeypatch.setattr(seed, "_state_at_import", torch.get_rng_state())
    with captured_warnings() as lines:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = Line()
        fit(tmp_path, seed=7).fit(module, loader(4))
        assert lines == []
        fit(tmp_path, seed=7).fit(Line(), loader(4))
    assert len(lines) == 1


def test_no_warning_if_the_weights_come_from_a_checkpoint(tmp_path: Path) -> None:  # I-18
    path = tmp_path / "checkpoint"
    with captured_warnings() as lines:
        trainer = fit(tmp_path, seed=7)
        trainer.fit(Late(), loader(4))
        trainer.save_checkpoint(path)
        fit(tmp_path, seed=7, max_epochs=2).fit(Line(), loader(4), ckpt_path=path, allow=("module",))
    assert [line for line in lines if "are allowed" not in line] == []  # which is another class


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
