"""Progress lines if the output is not a terminal, and the remaining time of a run."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit
from callback_run import FakeRun

from drivetrain.callbacks import ProgressBar, progress_bar
from drivetrain.callbacks._bar_line import Phase, fit_line, format_time
from drivetrain.callbacks._deferred_values import NamedNumbers
from drivetrain.callbacks._progress_default import ProgressLines
from drivetrain.callbacks._time_left import TimeLeft
from drivetrain.module.train_module import TrainModule

_MODULE: Any = TrainModule()


class Clock:
    """A clock that is advanced by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(progress_bar, "_now", lambda: self.now)


class Timed(Regression):
    """Takes one second per step and two per evaluation batch."""

    def __init__(self, format_time: Clock) -> None:
        super().__init__()
        self.format_time = format_time

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.format_time.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.format_time.now += 2
        self.log("val_loss", float(batch_idx), prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.format_time.now += 2


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def _lines(out: io.StringIO) -> list[str]:
    return [line.partition(", train_loss=")[0] for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("kind", [ProgressLines, ProgressBar])
def test_a_file_gets_a_line_at_every_log_interval_or_half_a_minute_whichever_is_later(
    kind: Callable[..., ProgressBar], time: Clock
) -> None:
    # L-09
    out = io.StringIO()
    trainer = quiet_fit(max_epochs=2, callbacks=kind(stream=out), log_every_n_steps=10, enable_progress_bar=True)
    trainer.fit(Timed(time), loader(400), loader(80))  # 100 steps of 1 s and 20 batches of 2 s in each epoch
    assert _lines(out) == [
        "Epoch 1/2: step 30, 30/100 batches, 0:30, 1.0 it/s, run 2:50 left",
        "Epoch 1/2: step 60, 60/100 batches, 1:00, 1.0 it/s, run 2:20 left",
        "Epoch 1/2: step 90, 90/100 batches, 1:30, 1.0 it/s, run 1:50 left",
        # Half a minute after the last line; the pace includes the validations so far.
        "Validation: 10/20 batches, 0:20, 2.00 s/it, 0:20 left, val_loss=4.5",
        "Epoch 1/2: 100 batches, 1:40, 1.0 it/s, run 2:37 left",
        "Epoch 2/2: step 130, 30/100 batches, 0:30, 1.0 it/s, run 1:38 left",
        "Epoch 2/2: step 160, 60/100 batches, 1:00, 1.0 it/s, run 0:52 left",
        "Epoch 2/2: step 190, 90/100 batches, 1:30, 1.0 it/s, run 0:12 left",
        "Validation: 10/20 batches, 0:20, 2.00 s/it, 0:20 left, val_loss=4.5",
        "Epoch 2/2: 100 batches, 1:40, 1.0 it/s",
    ]


def test_a_log_interval_of_more_than_half_a_minute_is_the_pace(time: Clock) -> None:
    # L-09
    out = io.StringIO()
    trainer = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=50, max_steps=120, max_epochs=-1)
    trainer.fit(Timed(time), loader(800))
    assert [line.partition(",")[0] for line in _lines(out)] == [
        "Epoch 1: step 50/120",
        "Epoch 1: step 100/120",
        "Epoch 1: 120 batches",
    ]


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_an_evaluation_that_takes_long_says_how_far_it_is(stage: str, time: Clock) -> None:
    # L-09; the count continues over two loaders
    out = io.StringIO()
    trainer = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=5)
    getattr(trainer, stage)(_Several(time), [loader(64), loader(64)])  # 32 batches of 2 s in all
    assert [line.partition(",")[0].partition(" ")[2] for line in out.getvalue().splitlines()] == [
        "15/32 batches",
        "31/32 batches",
        "32 batches",
    ]


class _Several(Timed):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.format_time.now += 2

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.format_time.now += 2


def test_without_a_log_interval_or_time_no_line_comes(time: Clock) -> None:
    out = io.StringIO()
    for interval in (0, 1000):
        trainer = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=interval)
        trainer.fit(Timed(time), loader(400))
    assert [line.partition(",")[0] for line in _lines(out)] == ["Epoch 1/1: 100 batches"] * 2


def test_a_line_does_not_wait_for_a_device(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-09, O-04: a line whose values have not arrived is printed at the next interval, with its own step
    class Late(NamedNumbers):
        arrived = False

        @property
        def has_arrived(self) -> bool:
            return self.arrived

    monkeypatch.setattr(progress_bar, "NamedNumbers", Late)
    out, bar = io.StringIO(), ProgressLines()
    bar._stream = out
    run: Any = FakeRun(num_training_batches=100, max_epochs=1, progress_bar_values={"loss": torch.tensor(0.5)})
    bar.setup(run, _MODULE, "fit")
    bar.on_fit_start(run, _MODULE)
    bar.on_train_start(run, _MODULE)
    for step in (40, 50, 80):
        time.now += 10 if step == 50 else 40
        run.global_step = run.micro_batches = run.batch_idx = step
        Late.arrived = step == 80
        run.progress_bar_values = {"loss": torch.tensor(step / 100)}
        bar.write_progress(run, _MODULE, step)
        assert out.getvalue().count("\n") == (2 if step == 80 else 0)
    first, second = out.getvalue().splitlines()
    assert first.startswith("Epoch 1/1: step 40, 40/100 batches")
    assert first.endswith("loss=0.4")
    assert second.startswith("Epoch 1/1: step 80, ")
    assert second.endswith("loss=0.8")


# Remaining time


def _left(run: FakeRun, made: int, seconds: float) -> float | None:
    """Return the remaining seconds after ``made`` micro-batches took ``seconds``, after a first one of a minute."""
    left = TimeLeft(run, 0.0)  # type: ignore[arg-type]
    run.micro_batches = run.batch_idx = 1
    left.seconds(run, 60.0)  # type: ignore[arg-type]
    run.micro_batches = run.batch_idx = 1 + made
    return left.seconds(run, 60.0 + seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"max_epochs": 2}, 2 * 100 - 11),
        ({"max_epochs": -1, "max_steps": 50}, 50),
        ({"max_epochs": 1, "max_steps": 50}, 50),
        ({"max_epochs": 1, "max_steps": 500}, 100 - 11),
        ({"max_epochs": -1, "max_steps": 50, "accumulate_grad_batches": 8}, 50 * 100 / 13),  # 13 windows an epoch
        ({"max_epochs": 2, "max_time": timedelta(seconds=100)}, 100 - 70),
        ({"max_epochs": -1, "max_time": {"seconds": 100}}, 100 - 70),
        ({"max_epochs": -1}, None),
        ({"max_epochs": 3, "num_training_batches": float("inf")}, None),
        ({"max_epochs": 3, "num_training_batches": float("inf"), "max_steps": 7}, 7),
    ],
)
def test_the_first_limit_counts_and_what_is_unknown_is_not_made_up(
    options: dict[str, Any], seconds: float | None
) -> None:
    # L-09
    left = _left(FakeRun(**{"num_training_batches": 100, **options}), made=10, seconds=10)
    assert left == (None if seconds is None else pytest.approx(seconds))


def test_what_was_slow_once_does_not_count_and_a_run_that_went_back_begins_a_new_average() -> None:
    run = FakeRun(num_training_batches=100, max_epochs=1)
    left = TimeLeft(run, 0.0)  # type: ignore[arg-type]
    assert left.seconds(run, 5.0) is None  # type: ignore[arg-type]
    seen = []
    for made, now in ((1, 60.0), (1, 61.0), (3, 62.0), (2, 63.0), (4, 65.0), (100, 70.0)):
        run.micro_batches = run.batch_idx = made
        seen.append(left.seconds(run, now))  # type: ignore[arg-type]
    assert seen == [99 * 60, 99 * 60, 97 * 1, 98 * 1, 96 * 1, 0]


# Lines shortened to the width of the terminal


@pytest.mark.parametrize("width", [*range(1, 130), 200])
def test_a_line_fits_into_every_width(width: int) -> None:
    # L-09
    metrics = {"loss": 0.123456, "grad_norm": 1234567.0, "accuracy_top5": 0.5}
    for total, run, shown in itertools.product((5678, math.inf), ("run 1d 12:04:33 left", ""), (metrics, {})):
        phase = Phase("Epoch 10/200", total, 0.0)
        phase.done = 1234
        line = fit_line(phase, shown, 3700.0, run, width)
        text = f"{line.title} {'|' + '#' * line.width + '| ' if line.width else ''}{line.rest}".rstrip()
        assert len(text) <= max(width, len(line.title))
        assert len(line.title) <= width
        assert line.filled <= line.width <= 24
        if width >= 60:
            assert text.startswith("Epoch 10/200")
            assert "1234" in text
            assert not shown or "loss=0.1235" in text
        if width == 200:
            assert all(part in text for part in (run, *(f"{name}=" for name in shown)))
            assert "…" not in text
            assert (line.width == 24) is (total == 5678)


def test_metrics_go_from_the_last_on_and_it_shows() -> None:
    # L-09
    phase = Phase("Epoch 1/2", 120, 0.0)
    phase.done = 60
    line = fit_line(phase, {"a": 1.0, "b" * 30: 2.0, "c": 3.0}, 10.0, "run 1:12 left", 79)
    assert line.rest == "60/120 [0:10<0:10, 6.0 it/s] run 1:12 left a=1 …"


def test_long_times_are_told_in_days() -> None:
    assert [format_time(seconds) for seconds in (86399, 86400, 200000)] == ["23:59:59", "1d 0:00:00", "2d 7:33:20"]
