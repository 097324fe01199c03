"""The error report of a failed run: the first cause, once, with its location. Rows G-01, G-02."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts import TORCHRUN, Run, run_cases

# Two epochs of eight micro-batches per rank, with two per window.
_SCRIPT = """
import logging

LAUNCHER = "fork" if CASE == "fork" else "auto"

class OnOneRank(Model):
    def on_train_start(self):
        if self.global_rank == 0:
            logging.getLogger("drivetrain").warning("on rank 0")
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 3 and self.global_rank == 1:
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)

class OnAll(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("boom" + str((CASE == "each") * self.global_rank))
        return super().training_step(batch, batch_idx)

if CASE in ("alike", "each"):
    quiet(strategy="ddp", devices=2, default_root_dir="run").fit(OnAll(), loader(64, 4))
settings = dict(strategy="ddp", devices=2, launcher=LAUNCHER, accumulate_grad_batches=2, limit_val_batches=0)
quiet(**settings, default_root_dir="undisturbed").fit(Model(), loader(64, 4))
quiet(**settings, default_root_dir="run", max_epochs=2).fit(OnOneRank(), loader(64, 4))
"""
_WHERE = "Where: rank 1, epoch 1, global step 5, batch index 3"


@dataclass
class Ran:
    """A run, and its folder."""

    run: Run
    folder: Path


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """A script that starts its processes itself."""
    return _cases(tmp_path_factory, "subprocess", "fork", "alike", "each")


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    return _cases(tmp_path_factory, "torchrun", "alike", command=TORCHRUN)


def _cases(factory: pytest.TempPathFactory, *cases: str, command: tuple[str, ...] = ()) -> dict[str, Ran]:
    folder = factory.mktemp("cases")
    runs = run_cases(folder, _SCRIPT, cases, *command, limit=120)
    return {case: Ran(run, folder / str(number)) for number, (case, run) in enumerate(runs.items())}


@pytest.mark.parametrize("launched", ["subprocess", "torchrun", "fork"])
def test_the_first_cause_is_printed_once_with_its_place(  # G-01
    launched: str, request: pytest.FixtureRequest
) -> None:
    ran = request.getfixturevalue("under_torchrun" if launched == "torchrun" else "by_itself")[launched]
    run, folder = ran.run, ran.folder
    assert run.code == 1
    errors = run.errors
    assert errors.count(_WHERE) == 1, errors
    logs = [folder / "run" / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    if launched == "fork":  # the ranks print nothing: their errors are in what the caller raises
        assert "Rank 1 failed with ValueError: boom" in errors
    else:
        assert errors.count("Traceback (most recent call last)") == 1, errors
        assert f"ValueError: boom\n{_WHERE}\nLog: {logs[1]}\n" in errors, errors
        told = [line for line in errors.splitlines() if line.startswith("Rank 0 ends")]
        assert told == [
            f"Rank 0 ends because another rank failed: Rank 1 failed with ValueError: boom; Log: {logs[0]}"
        ], errors

    # Errors that other ranks did not print are recorded, with the preceding lines.
    assert not (folder / "undisturbed").exists()
    first, second = (log.read_text() for log in logs)
    assert first.count("WARNING: on rank 0\n") == 1, first
    assert errors.count("on rank 0\n") == 1  # and displayed as usual
    assert "in _train_epoch" in first
    assert "Where: rank 0, epoch 1, global step 5, batch index 3" in first
    assert "The failure was caused by another rank:\nRank 1 failed with ValueError: boom" in first
    assert f"ValueError: boom\n{_WHERE}\n" in second


@pytest.mark.parametrize("launched", ["subprocess", "torchrun"])
def test_an_error_on_all_ranks_is_shown_by_the_first(launched: str, request: pytest.FixtureRequest) -> None:
    ran = request.getfixturevalue("under_torchrun" if launched == "torchrun" else "by_itself")["alike"]
    assert ran.run.code == 1
    errors = ran.run.errors
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert "ValueError: boom0\nWhere: rank 0, epoch 0, global step 3, batch index 3\n" in errors
    log = ran.folder / "run" / "logs" / "rank-1.log"
    line = (
        "Rank 1 failed with ValueError: boom0; rank 0 failed the same way and shows the traceback; "
        "Where: rank 1, epoch 0, "
    )
    assert f"{line}global step 3, batch index 3; Log: {log}\n" in errors, errors
    assert "Traceback (most recent call last)" in log.read_text()


def test_independent_errors_are_shown_by_each_rank(by_itself: dict[str, Ran]) -> None:
    errors = by_itself["each"].run.errors
    assert [errors.count(f"\nValueError: boom{rank}\nWhere: rank {rank}") for rank in (0, 1)] == [1, 1], errors
