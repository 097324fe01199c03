"""How a run ends: its closing message with the reason and its files, and errors that name their place.

An out-of-memory error has a note with sizes and the settings to change, and each rank has a log (G-01).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
from small_modules import calling, linear, tiny
from torch.utils.data import DataLoader, IterableDataset

from captured_warnings import captured_warnings
from drivetrain import CheckpointError, ConfigurationError, Fit, Precision, Strategy

# Private: a run would have to log 16 MiB, and to lose its folder.
from drivetrain._engine.ranks.rank_log import MAX_LOG_BYTES, RankLog
from drivetrain._runs.run_folder import RunFolder
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger
from drivetrain.precision import HalfPrecision, MixedPrecision
from drivetrain_strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

LOUD: dict[str, Any] = {"enable_progress_bar": True, "enable_checkpointing": True}


def worsening() -> Tiny:
    """A module whose second validation is the best."""
    return tiny(validation_step=lambda self, *_: self.log("val_loss", [3.0, 1.0, 2.0][self.trainer.current_epoch]))


def closing_lines(path: Path, module: Any = None, raises: Any = None, **options: Any) -> list[str]:
    """Return the closing lines of a fit, without the duration."""
    run = fit(path, **{**LOUD, "num_sanity_val_steps": 0, **options})
    with captured_warnings(logging.INFO) as lines, pytest.raises(raises) if raises else nullcontext():
        run.fit(module or Tiny(), loader(), loader())
    ends = [line for line in lines if line.startswith("The run ended")]
    assert len(ends) <= 1
    return [re.sub(r" after [\d:]+\.", "", line) for end in ends for line in end.splitlines()]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_unsaved_run_is_reported_once(tmp_path: Path) -> None:
    # L-09: the time limit is reached with the last batch of an epoch, which is saved before and after the validation
    with captured_warnings(logging.WARNING) as lines:
        fit(tmp_path, max_epochs=-1, max_time={"seconds": 0.001}).fit(Tiny(), loader(), loader())
    assert sum("nothing is saved" in line for line in lines) == 1


def test_checkpoints_and_files_are_named_relative_to_the_working_directory(tmp_path: Path) -> None:  # L-09
    options = {"max_epochs": 3, "logger": CSVLogger(tmp_path / "runs", "one")}
    lines = closing_lines(tmp_path, worsening(), callbacks=Checkpoint(monitor="val_loss", keep_last=1), **options)
    assert lines == [
        "The run ended: max_epochs=3 is reached (3 epochs, 12 optimizer steps)",
        "  best checkpoint: runs/one/version_0/checkpoints/epoch=1-step=8 (val_loss 1)",
        "  last checkpoint: runs/one/version_0/checkpoints/epoch=2-step=12",
        "  files: runs/one/version_0 (checkpoints/, metrics.csv, run.json)",
    ]
    assert all(Path(re.sub(r" \(.*", "", line.partition(": ")[2])).is_dir() for line in lines[1:])


def test_a_small_run_logs_one_line(tmp_path: Path) -> None:
    # L-09: the message stays short if a hundred fits wrote to the folder
    ended = "The run ended: max_epochs=1 is reached (1 epoch, 4 optimizer steps)"
    assert closing_lines(tmp_path, enable_checkpointing=False) == [ended]
    save = calling("on_train_epoch_end", lambda trainer: trainer.save_checkpoint("removed"))
    remove = calling("on_train_end", lambda trainer: shutil.rmtree("removed"))
    assert closing_lines(tmp_path, enable_checkpointing=False, callbacks=[save, remove]) == [ended]
    assert closing_lines(tmp_path, enable_progress_bar=False, logger=CSVLogger(tmp_path, "quiet")) == [ended]
    for lines, named in (
        (closing_lines(tmp_path), "last checkpoint"),
        (closing_lines(tmp_path, worsening(), callbacks=Checkpoint(monitor="val_loss")), "best and last checkpoint"),
    ):
        assert [line.partition(":")[0] for line in lines[1:]] == [f"  {named}", "  files"]
    with captured_warnings(logging.INFO) as lines:
        fit(tmp_path, **LOUD).validate(Tiny(), loader(), verbose=False)
    assert not any("ended" in line for line in lines)

    def refuse(trainer: Any) -> None:
        raise ConfigurationError("no")

    assert closing_lines(tmp_path, raises=ConfigurationError, callbacks=calling("on_fit_start", refuse)) == []


def test_a_preempted_run_names_its_checkpoint(tmp_path: Path) -> None:  # L-09
    def leave(trainer: Any) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [calling("on_train_batch_end", leave), Checkpoint(monitor="val_loss")]
    lines = closing_lines(tmp_path, worsening(), SystemExit, max_epochs=3, callbacks=callbacks)
    folder = "drivetrain_logs/version_0"
    assert lines == [
        "The run ended: SIGTERM asked it to save and leave (1 epoch, 7 optimizer steps)",
        f"  best checkpoint: {folder}/checkpoints/epoch=0-step=4 (val_loss 3)",
        f"  last checkpoint: {folder}/checkpoints/interrupted-step=7",
        f"  files: {folder} (checkpoints/, run.json)",
    ]
    assert all(Path(re.sub(r" \(.*", "", line.partition(": ")[2])).is_dir() for line in lines[1:])


@pytest.mark.parametrize(
    ("error", "why"),
    [(ValueError("no luck\nand more of it"), "ValueError: no luck"), (KeyboardInterrupt(), "KeyboardInterrupt")],
)
def test_a_failure_names_the_checkpoint_to_resume_from(tmp_path: Path, error: BaseException, why: str) -> None:  # L-09
    def fail(trainer: Any) -> None:
        if trainer.global_step == 6:
            raise error

    for keeps, saved in ((False, "0/checkpoints/epoch=0-step=4"), (True, "1/checkpoints/exception-step=6")):
        callbacks = [calling("on_train_batch_start", fail), Checkpoint(save_on_exception=keeps)]
        lines = closing_lines(tmp_path, raises=type(error), max_epochs=3, callbacks=callbacks)
        assert lines[0] == f"The run ended: {why} (1 epoch, 6 optimizer steps)"
        assert lines[1] == f"  last checkpoint: drivetrain_logs/version_{saved}"


class PlannedError(Exception):
    """An error that only these tests raise."""


def failing(method: str, nth: int) -> Regression:
    """A module that raises at the ``nth`` call of a method."""
    calls: list[str] = []

    def call(self: Any, *args: Any) -> Any:
        calls.append(method)
        if len(calls) == nth:
            raise PlannedError
        return self.loss(args[0]) if method == "training_step" else None

    return linear(**{"validation_step": lambda self, batch: None, method: call})


def location_of(run: Any) -> str:
    with pytest.raises(PlannedError) as caught:
        run()
    (note,) = caught.value.__notes__
    assert note.startswith("Where: rank 0")
    return str(note).removeprefix("Where: rank 0")


@pytest.mark.parametrize(
    ("method", "nth", "where"),
    [
        ("training_step", 9, ", epoch 1, global step 8, batch index 2"),
        ("on_train_batch_end", 3, ", epoch 0, global step 3, batch index 2"),
        ("on_train_batch_start", 6, ", epoch 0, global step 5, batch index 5"),  # after a validation
        ("validation_step", 4, ", epoch 0, global step 4, evaluation batch index 3"),
        ("on_validation_end", 1, ", epoch 0, global step 4, after 4 batches of the epoch"),
        ("on_train_epoch_start", 2, ", epoch 1, global step 6"),
        ("on_train_epoch_end", 2, ", epoch 1, global step 12"),
    ],
)
def test_an_error_states_the_location_of_the_run(tmp_path: Path, method: str, nth: int, where: str) -> None:  # K-04
    run = fit(tmp_path, max_epochs=2, val_check_interval=4, num_sanity_val_steps=0)
    assert location_of(lambda: run.fit(failing(method, nth), regression(), regression())) == where


def test_an_error_of_an_evaluation_or_of_the_data_states_its_location(tmp_path: Path) -> None:
    class Breaking(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from [(torch.ones(3), torch.ones(1))] * 5
            raise PlannedError

    run, data, breaking = fit(tmp_path), regression(), DataLoader(Breaking(), batch_size=None)
    assert location_of(lambda: run.validate(failing("validation_step", 3), data)) == ", evaluation batch index 2"
    assert location_of(lambda: run.predict(failing("predict_step", 2), data)) == ", prediction batch index 1"
    assert location_of(lambda: run.fit(Regression(), breaking)).endswith("batches of the epoch")


def frames(error: BaseException) -> list[tuple[str, str]]:
    """Return the file and function of each frame, outermost first."""
    return [(Path(one.filename).name, one.name) for one in traceback.extract_tb(error.__traceback__)]


def test_a_refusal_before_the_run_shows_only_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Fit(max_epochs=1.5)  # type: ignore[arg-type]
    assert len(frames(caught.value)) == 2
    trainer = fit(tmp_path, strategy="ddp", devices=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Tiny(), [])
    assert [name for _, name in frames(caught.value)][1:] == ["fit", "_launch"]


def test_frames_of_user_code_and_those_of_other_errors_are_kept(tmp_path: Path) -> None:  # I-17
    def logs(module: Any) -> None:
        module.log("note", "no number")

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        logs(self)

    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(tiny(training_step=step), loader())
    names = [name for _, name in frames(caught.value)]
    assert names[-2:] == ["step", "logs"]
    assert len(names) == 5
    assert "Where: rank 0, epoch 0" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(PlannedError) as planned:
        fit(tmp_path).fit(failing("on_train_start", 1), regression())
    assert ("session.py", "execute") in frames(planned.value)


def test_mismatched_weights_are_reported_once(tmp_path: Path) -> None:
    trainer, wider = fit(tmp_path), Regression()
    trainer.fit(Regression(), regression())
    trainer.save_checkpoint(tmp_path / "saved")
    wider.more = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"more\.weight") as caught:
        fit(tmp_path, max_epochs=2).fit(wider, regression(), ckpt_path=tmp_path / "saved", allow="optimizer")
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("do not fit") == 1


class Hungry(Regression):
    """Allocates more memory than any machine has, in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(1000, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        activation = torch.ones(1000, 10)
        if batch_idx == 2:
            torch.empty(2**50)
        return self.loss(batch) + 0.0 * (self.wide.weight.sum() + activation.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def note_of(path: Path, batch_size: int = 4, **options: Any) -> list[str]:
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        fit(path, **options).fit(Hungry(), regression(batch_size=batch_size))
    note, where = caught.value.__notes__
    assert where == "Where: rank 0, epoch 0, global step 2, batch index 2"
    assert note in "".join(traceback.format_exception(caught.value))
    return note.splitlines()


def test_the_error_names_sizes_and_settings_to_change(tmp_path: Path) -> None:
    lines = note_of(tmp_path)
    assert lines[0].startswith("Out of memory on rank 0, cpu, fit, global_step=2.")
    assert re.fullmatch(r"  parameters 3\.9\d+ KiB, optimizer state 7\.8\d+ KiB", lines[1])
    assert lines[-4] == "Change first: batch_size=2 instead of 4 with accumulate_grad_batches=2: the same steps"
    assert "precision='bf16-mixed'" in lines[-3]
    assert "strategy='fsdp' on several devices" in lines[-2]
    assert "activation checkpointing" in lines[-1]


class CustomStrategy(SingleDeviceStrategy):
    """A third-party strategy with its own settings, or without any."""

    silent = False

    def memory_advice(self, module: torch.nn.Module) -> list[str]:
        shelves = f"CustomStrategy(shelves={sum(1 for _ in module.parameters())})"
        return [] if self.silent else ["CustomStrategy(fold=True)", shelves]


def test_a_third_party_strategy_gives_its_own_advice(tmp_path: Path) -> None:  # K-02
    strategy = CustomStrategy()
    lines = note_of(tmp_path, strategy=strategy)
    assert [line.strip().removeprefix("then: ") for line in lines[-3:]] == [
        "precision='bf16-mixed': activations of half the size",
        "CustomStrategy(fold=True)",
        "CustomStrategy(shelves=4)",
    ]
    strategy.silent = True
    lines = note_of(tmp_path, strategy=strategy, precision="bf16-true", batch_size=1)
    assert "On this rank there were:" in lines[0]
    assert not any("Change first" in line for line in lines)


BY_HAND = "activation checkpointing (torch.utils.checkpoint around each block)"
BY_CLASS = "activation checkpointing (FSDPStrategy(activation_checkpointing=[Block]))"
OFFLOAD = "FSDPStrategy(cpu_offload=True)"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (SingleDeviceStrategy(), ["strategy='fsdp' on several devices", BY_HAND]),
        (DDPStrategy(), ["strategy='fsdp' on several devices", BY_HAND]),
        (FSDPStrategy(), [OFFLOAD, BY_CLASS]),
        (FSDPStrategy("grad_op"), ["FSDPStrategy(sharding='full')", OFFLOAD, BY_CLASS]),
        (FSDPStrategy(cpu_offload=True, activation_checkpointing=[torch.nn.Linear]), []),
    ],
)
def test_each_strategy_advises_its_own_settings(strategy: Strategy, expected: list[str]) -> None:
    advice = strategy.memory_advice(torch.nn.Linear(1, 1))
    assert [one.partition(":")[0] for one in advice] == expected


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision(), ["precision='bf16-mixed'"]),
        (MixedPrecision("bf16-mixed", "cpu"), ["precision='bf16-true'"]),
        (MixedPrecision("16-mixed", "cpu"), ["precision='16-true'"]),
        (HalfPrecision("bf16-true"), []),
    ],
)
def test_each_precision_advises_a_lower_one(precision: Precision, expected: list[str]) -> None:
    assert [one.partition(":")[0] for one in precision.memory_advice()] == expected


def rank_log(path: Path | str | None) -> RankLog:
    folder = RunFolder()
    folder.path = None if path is None else str(path)
    return RankLog(folder, 1)


def test_a_log_is_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rank_log(tmp_path / "run").folder == str(tmp_path / "run" / "logs")
    assert rank_log("run").folder == str(tmp_path / "run" / "logs")
    assert rank_log(None).folder is None  # a run without files
    assert rank_log("memory://bucket/runs/a").folder is None
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_log_does_not_fail_the_run(tmp_path: Path) -> None:
    first, second = ValueError("first"), ValueError("second")
    rank_log(tmp_path).add_failure(first, "the traceback")
    path = tmp_path / "logs" / "rank-1.log"
    assert path.read_text().endswith("rank 1: ERROR: The run failed.\nthe traceback\n")
    assert first.__notes__ == [f"Log: {path}"]
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file in the folder's place")
    rank_log(tmp_path).add_failure(second, "the traceback")
    assert not hasattr(second, "__notes__")


def test_a_log_is_bounded_and_keeps_the_newest_records(tmp_path: Path) -> None:
    log = rank_log(tmp_path)
    count = 24
    for number in range(count):
        log.handle(logging.makeLogRecord({"levelname": "WARNING", "msg": f"record {number} {'e' * 2**20}"}))
    log.add_failure(ValueError("last"), "the traceback")
    newest, before = (tmp_path / "logs" / name for name in ("rank-1.log", "rank-1.log.1"))
    assert sorted(newest.parent.iterdir()) == sorted([newest, before])
    assert MAX_LOG_BYTES // 2 < before.stat().st_size <= MAX_LOG_BYTES
    assert newest.stat().st_size <= MAX_LOG_BYTES
    found = (before.read_text() + newest.read_text()).splitlines()
    kept = [
        int(words[1]) for line in found if (words := line.partition("rank 1: WARNING: ")[2].split())[:1] == ["record"]
    ]
    assert kept == list(range(kept[0], count))
    assert "rank 1: ERROR: The run failed.\nthe traceback\n" in newest.read_text()
    # What another run has written to the file counts towards its size.
    with newest.open("ab") as file:
        file.truncate(MAX_LOG_BYTES)
    rank_log(tmp_path).add_cause(ValueError("a run that goes on"))
    assert newest.read_text().endswith("a run that goes on\n")
    assert newest.stat().st_size < 200
    assert before.stat().st_size == MAX_LOG_BYTES
