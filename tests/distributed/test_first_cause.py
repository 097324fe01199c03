"""The end of a failed script: soon, and with the first cause, once, and its location. Rows A-08, G-01, G-02."""

from __future__ import annotations

import pytest
from scripts import TORCHRUN, Run, run_cases

# Two epochs of eight micro-batches per rank, with two per window.
_SCRIPT = """
import logging

class OnOneRank(Model):
    def on_train_start(self):
        if self.global_rank == 0:
            logging.getLogger("drivetrain").warning("on rank 0")
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and batch_idx == 3 and self.global_rank == 1:
            if CASE == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")
        return super().training_step(batch, batch_idx)

class OnAll(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("boom" + str((CASE == "each") * self.global_rank))
        return super().training_step(batch, batch_idx)

if CASE in ("alike", "each"):
    quiet(strategy="ddp", devices=2, default_root_dir="run", enable_checkpointing=True).fit(OnAll(), loader(64, 4))
settings = dict(strategy="ddp", devices=2, accumulate_grad_batches=2, limit_val_batches=0)
settings["launcher"] = "fork" if CASE == "fork" else "auto"
quiet(**settings, default_root_dir="undisturbed").fit(Model(), loader(64, 4))
if RANK == 1 and CASE == "before fit":
    raise KeyError(CASE)
if RANK == 1 and CASE == "leaves before fit":
    sys.exit()
began = time.time()
try:
    run = quiet(**settings, default_root_dir="run", max_epochs=2, enable_checkpointing=True)
    run.fit(OnOneRank(), loader(64, 4))
finally:
    say("took", round(time.time() - began, 1))
"""
_LOGS = "run/drivetrain_logs/version_0/logs"
_WHERE = "Where: rank 1, epoch 1, global step 5, batch index 3"

_ENDS = {
    "killed": "Rank 1 was killed by SIGKILL",
    "before fit": "Rank 1 failed with KeyError: 'before fit'",
    "leaves before fit": "rank 1 has already left the script",
}


@pytest.fixture(scope="module")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A script that starts its processes itself."""
    cases = ["subprocess", "fork", "alike", "each", *_ENDS]
    return run_cases(tmp_path_factory.mktemp("cases"), _SCRIPT, cases, limit=170)


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_cases(tmp_path_factory.mktemp("cases"), _SCRIPT, ["torchrun", "alike"], *TORCHRUN)


@pytest.mark.parametrize("launched", ["subprocess", "torchrun", "fork"])
def test_the_first_cause_is_printed_once_with_its_place(  # G-01
    launched: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue("under_torchrun" if launched == "torchrun" else "by_itself")[launched]
    errors = run.errors
    assert run.code == 1
    assert errors.count(_WHERE) == 1, errors
    logs = [run.folder / _LOGS / f"rank-{rank}.log" for rank in (0, 1)]
    if launched == "fork":  # the ranks print nothing: their errors are in what the caller raises
        assert "Rank 1 failed with ValueError: boom" in errors
    else:
        assert errors.count("Traceback (most recent call last)") == 1, errors
        assert f"ValueError: boom\n{_WHERE}\nLog: {logs[1]}\n" in errors, errors
        told = [line for line in errors.splitlines() if line.startswith("Rank 0 ends")]
        because = "Rank 0 ends because another rank failed: Rank 1 failed with ValueError: boom"
        assert told == [f"{because}; Log: {logs[0]}"], errors

    # Errors that other ranks did not print are recorded, with the preceding lines.
    assert not (run.folder / "undisturbed").exists()
    first, second = (log.read_text() for log in logs)
    assert first.count("WARNING: on rank 0\n") == 1, first
    assert errors.count("on rank 0\n") == 1  # and displayed as usual
    assert "in _train_epoch" in first
    assert "Where: rank 0, epoch 1, global step 5, batch index 3" in first
    assert "The failure was caused by another rank:\nRank 1 failed with ValueError: boom" in first
    assert f"ValueError: boom\n{_WHERE}\n" in second


@pytest.mark.parametrize("launched", ["by_itself", "under_torchrun"])
def test_an_error_on_all_ranks_is_shown_by_the_first(launched: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(launched)["alike"]
    errors = run.errors
    assert run.code == 1
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert "ValueError: boom0\nWhere: rank 0, epoch 0, global step 3, batch index 3\n" in errors
    log = run.folder / _LOGS / "rank-1.log"
    line = "Rank 1 failed with ValueError: boom0; rank 0 failed the same way and shows the traceback; "
    place = "Where: rank 1, epoch 0, global step 3, batch index 3"
    assert f"{line}{place}; Log: {log}\n" in errors, errors
    assert "Traceback (most recent call last)" in log.read_text()


def test_independent_errors_are_shown_by_each_rank(by_itself: dict[str, Run]) -> None:
    errors = by_itself["each"].errors
    assert [errors.count(f"\nValueError: boom{rank}\nWhere: rank {rank}") for rank in (0, 1)] == [1, 1], errors


@pytest.mark.parametrize(("case", "told"), [("subprocess", "ValueError: boom"), *_ENDS.items()])
def test_a_script_with_a_failed_rank_ends_soon_with_the_reason(case: str, told: str, by_itself: dict[str, Run]) -> None:
    # G-01, G-02, A-08
    run = by_itself[case]
    assert run.code != 0
    assert told in run.errors, run.errors
    (took,) = [float(line.split()[-1]) for line in run.reported if line.startswith("0 took")]
    assert took < 15
