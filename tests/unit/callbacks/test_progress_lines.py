"""Progress lines if the output is not a terminal or fails (L-09), the remaining time, and lines of every width."""

from __future__ import annotations

import io
import itertools
import logging
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callback_modules import Clock, Regression, Timed, loader, quiet_fit

# Private: replaces the terminal by one that fails; texts and estimates in many situations, without a run for each.
from drivetrain._runtime import terminal_output
from drivetrain._runtime.terminal_output import write_output
from drivetrain.callbacks import ProgressBar, RichProgressBar, progress_bar
from drivetrain.callbacks._bar_line import Phase, fit_line, format_number, format_rate, format_time
from drivetrain.callbacks._deferred_values import NamedNumbers
from drivetrain.callbacks._progress_default import ProgressLines
from drivetrain.callbacks._time_left import TimeLeft


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "_now", clock.monotonic)
    return clock


def _lines(out: io.StringIO) -> list[str]:
    return [line.partition(", train_loss=")[0] for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("kind", [ProgressLines, ProgressBar, RichProgressBar])
def test_a_file_gets_a_line_at_every_log_interval_or_half_a_minute_whichever_is_later(
    kind: Callable[..., ProgressBar], clock: Clock
) -> None:  # L-09
    out = io.StringIO()
    trainer = quiet_fit(max_epochs=2, callbacks=kind(stream=out), log_every_n_steps=10, enable_progress_bar=True)
    trainer.fit(Timed(clock), loader(100, 1), loader(20, 1))  # 100 steps of 1 s and 20 batches of 2 s in each epoch
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
    assert not {"\r", "\x1b"} & set(out.getvalue())


@pytest.mark.parametrize(
    ("interval", "lines"),
    [(50, ["step 50/120", "step 100/120", "120 batches"]), *((n, ["120 batches"]) for n in (0, 999))],
)
def test_lines_are_no_closer_than_the_log_interval(interval: int, lines: list[str], clock: Clock) -> None:  # L-09
    out = io.StringIO()
    fit = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=interval, max_steps=120, max_epochs=-1)
    fit.fit(Timed(clock), loader(200, 1))
    assert [line.partition(",")[0] for line in _lines(out)] == [f"Epoch 1: {line}" for line in lines]


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_a_long_evaluation_prints_its_progress_over_all_loaders(stage: str, clock: Clock) -> None:  # L-09
    out = io.StringIO()
    trainer = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=5)
    getattr(trainer, stage)(Timed(clock), [loader(64), loader(64)])  # 32 batches of 2 s in all
    lines = [line.partition(",")[0].partition(" ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["15/32 batches", "31/32 batches", "32 batches"]


def test_a_line_does_not_wait_for_a_device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-09, O-04: a line whose values have not arrived is printed at a later interval, with its own step
    class Late(NamedNumbers):
        @property
        def has_arrived(self) -> bool:
            return clock.now >= 1080

    monkeypatch.setattr(progress_bar, "NamedNumbers", Late)
    losses: dict[int, float] = {}

    class Recorded(Timed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses[self.global_step] = float(outputs["loss"])

    out = io.StringIO()
    quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=10).fit(Recorded(clock), loader(100, 1))
    lines = [(line.partition(", ")[0], line.rpartition("=")[2]) for line in out.getvalue().splitlines()]
    assert lines[:2] == [(f"Epoch 1/1: step {step}", f"{losses[step]:.4g}") for step in (30, 80)]


def _left(made: int = 10, **options: Any) -> float | None:
    """Return the remaining seconds after micro-batches of a second each, after a first one of a minute."""
    run: Any = SimpleNamespace(num_training_batches=100, max_steps=-1, max_time=None, accumulate_grad_batches=1)
    run.__dict__.update({"current_epoch": 0, "global_step": 0, "micro_batches": 0, "batch_idx": 0, **options})
    left = TimeLeft(run, 0.0)
    for micro_batches, now in ((1, 60.0), (1 + made, 60.0 + made)):
        run.micro_batches = run.batch_idx = micro_batches
        seconds = left.seconds(run, now)
    return seconds


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
        ({"max_epochs": 1, "made": -1}, 100 * 60),  # after a rollback, before a new average
        ({"max_epochs": 1, "made": 99}, 0),
    ],
)
def test_the_remaining_time_is_that_of_the_first_limit(options: dict[str, Any], seconds: float | None) -> None:  # L-09
    assert _left(**options) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("width", [*range(1, 130), 200])
def test_a_line_fits_into_every_width(width: int) -> None:  # L-09
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


def test_the_last_metrics_are_left_out_first_and_marked() -> None:  # L-09
    phase = Phase("Epoch 1/2", 120, 0.0)
    phase.done = 60
    line = fit_line(phase, {"a": 1.0, "b" * 30: 2.0, "c": 3.0}, 10.0, "run 1:12 left", 79)
    assert line.rest == "60/120 [0:10<0:10, 6.0 it/s] run 1:12 left a=1 …"


@pytest.mark.parametrize(
    ("form", "values", "texts"),
    [
        (format_time, (5.9, 65, 3725, 86399, 86400, 200000), "0:05 1:05 1:02:05 23:59:59 1d+0:00:00 2d+7:33:20"),
        (format_rate, (0.5, 12.34, 0.0), "2.00+s/it 12.3+it/s 0.0+it/s"),
        (format_number, (3.0, 0.12345, 1e-7, math.nan, math.inf, 1e9), "3 0.1235 1e-07 nan inf 1e+09"),
    ],
)
def test_numbers_read_well(form: Callable[[float], str], values: tuple[float, ...], texts: str) -> None:
    assert [form(value).replace(" ", "+") for value in values] == texts.split()


class Named(Regression):
    """Logs a metric whose name is not ASCII."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("größe名", loss.detach(), prog_bar=True)
        return loss

    test_step = training_step


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class GoneTerminal(io.StringIO):
    """Fails like the terminal of a lost connection."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class AsciiTerminal(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def isatty(self) -> bool:
        return True


class OnlyWrites:
    """Has no other method, like objects that scripts use in place of ``sys.stdout``."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [FullDisk, GoneTerminal, closed, AsciiTerminal, OnlyWrites, lambda: None])
def test_the_run_continues(make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # L-09
    monkeypatch.setattr(progress_bar, "_LINE_INTERVAL", 0.0)
    monkeypatch.setattr(terminal_output, "_WARNED", set())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = make()
    with caplog.at_level(logging.WARNING, "drivetrain"), monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        fit = quiet_fit(enable_progress_bar=True, enable_model_summary=True, log_every_n_steps=1)
        fit.fit(Named(), loader())
        fit.test(Named(), loader())
        assert sys.stdout is stream
    assert fit.state == "finished"
    warnings = [record for record in caplog.records if "cannot be shown" in record.getMessage()]
    assert len(warnings) == (make in (FullDisk, GoneTerminal, closed))
    if isinstance(stream, OnlyWrites):
        assert "größe名=" in stream.text
    if isinstance(stream, AsciiTerminal):
        stream.flush()
        shown = stream.buffer.getvalue()  # type: ignore[attr-defined]
        assert b"gr??e?=" in shown
        assert b"???" not in shown  # the plain bar


def test_an_output_that_works_again_is_written_to() -> None:
    # L-09: the disk has free space again
    stream = FullDisk()
    write_output(stream, "lost\n")
    stream.flush = lambda: None  # type: ignore[method-assign]
    write_output(stream, "seen\n")
    assert stream.getvalue().endswith("seen\n")
