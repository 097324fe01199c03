"""Reading a checkpoint with arbitrary bytes ends in a value or a CheckpointError, in bounded time and memory (J-10).

A run resumes from some of them, up to its first step.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing_run import Augmented, Drawing
from mutating import Mutator

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.checkpoint import load, show, verify
from newest_checkpoint import newest

FAULTS = int(os.environ.get("FAULTS", "0"))
COUNT = 500 * FAULTS or 1000
RUNS = 25 * FAULTS or 50
SEED = int(os.environ.get("FAULTS_SEED", "5"))
OLDER = Path(__file__).parents[1] / "unit" / "checkpoint" / "older"
SECONDS = 10.0
MEBIBYTES = 200


def _read_all(path: Path) -> None:
    checkpoint = load(path)
    checkpoint.weights().staged()
    for index in range(len(checkpoint.manifest.optimizers)):
        checkpoint.optimizer_settings(index)
        checkpoint.optimizer_state(index)
    checkpoint.state()
    for rank in range(len(checkpoint.manifest.ranks)):
        checkpoint.rank_state(rank)


def _verify(path: Path) -> None:
    """Check that verifying raises nothing, and that everything can be read if it finds no problem."""
    if not verify(path):
        _read_all(path)


def _newest(path: Path) -> None:
    newest([str(path.parent)])


READINGS: tuple[Callable[[Path], object], ...] = (_read_all, _verify, show, _newest)


def _bounded(read: Callable[[Path], object], path: Path, what: str, *also: type[Exception]) -> bool:
    """Return whether it ended in a value; it may end in a CheckpointError."""
    began = time.process_time()
    try:
        read(path)
    except (CheckpointError, *also):  # type: ignore[misc]  # mypy takes no star here
        return False
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        assert time.process_time() - began < SECONDS, what
    return True


@pytest.mark.timeout(300 + 5 * FAULTS)
@pytest.mark.parametrize("kind", ["single_device", "ddp"])
def test_reading_ends_in_a_value_or_a_checkpoint_error(kind: str, tmp_path: Path) -> None:
    # J-10
    path = tmp_path / "checkpoints" / kind
    shutil.copytree(OLDER / kind, path)
    (path.parent / "latest").write_bytes(b"\xff\0../..")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = errors = 0
    for what in Mutator(path, SEED).mutations(COUNT // 2):
        for read in READINGS:
            ended = _bounded(read, path, f"{what}, {read.__name__}")
            values, errors = values + ended, errors + (not ended)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert values > COUNT // 20, "nothing came through"
    assert errors > COUNT // 20, "nothing was refused"
    assert grown < MEBIBYTES
    assert verify(path) == []


class _ReachedError(Exception):
    """Raised when the first step is about to begin."""


class _Validated(Drawing):
    def __init__(self) -> None:
        super().__init__(lambda *words: None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[:, 1:]).square().mean())


class _Stop(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        raise _ReachedError


class _SaveAt(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


def _fit(folder: Path, start: Path | None, *callbacks: Callback) -> Fit:
    monitors = EarlyStopping("val", patience=9), Checkpoint(folder / "kept", monitor="val", every_n_epochs=1)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 0, "max_epochs": 2}
    fit = Fit(accelerator="cpu", callbacks=[*monitors, *callbacks], **settings, **quiet)
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=8, shuffle=True)
    fit.fit(_Validated(), loader, torch.utils.data.DataLoader(Augmented(), batch_size=41), ckpt_path=start)
    return fit


@pytest.mark.timeout(300 + 5 * FAULTS)
def test_a_run_resumes_or_names_what_is_malformed(tmp_path: Path) -> None:
    # J-10
    path = tmp_path / "checkpoint"
    _fit(tmp_path, None, _SaveAt(path))

    def resume(path: Path) -> None:
        try:
            fit = _fit(tmp_path / "resumed", path, _Stop())
        except _ReachedError:
            return
        # The validation that was due at the save comes before the first step, and the weights may be of any size.
        assert fit.early_stopping_callback is not None
        assert "is not finite" in str(fit.early_stopping_callback.stopping_reason)

    resume(path)
    ended = [_bounded(resume, path, what, ConfigurationError) for what in Mutator(path, SEED).mutations(RUNS)]
    assert sum(ended) >= RUNS // 50, "no run went on"
    assert sum(ended) < RUNS - RUNS // 20, "nothing was refused"
