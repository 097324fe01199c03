from __future__ import annotations

import io
import pickle
import re
import sys
import time
from typing import Any

import pytest
import torch
from callback_run import FakeRun, FakeStrategy
from terminal_screen import Screen

from drivetrain._distributed.control_plane import LocalControl
from drivetrain._loops.hooks import HOOKS, HookTable
from drivetrain.callback import Callback
from drivetrain.callbacks import ProgressBar, RichProgressBar
from drivetrain.callbacks._bar_line import format_number, format_rate, format_time
from drivetrain.callbacks._progress_default import ProgressLines, default_progress_bar
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.testing import requires_package

_MODULE: Any = TrainModule()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _CountingRun(FakeRun):
    """Counts how often the metrics are read, which may wait for the device."""

    reads = 0

    @property
    def progress_bar_values(self) -> dict[str, torch.Tensor]:
        self.reads += 1
        return {"loss": torch.tensor(0.123456)}

    @progress_bar_values.setter
    def progress_bar_values(self, value: object) -> None:
        pass


def _train(bar: ProgressBar, run: FakeRun, epochs: int, batches: int, pause: float = 0.0) -> None:
    trainer: Any = run
    bar.setup(trainer, _MODULE, "fit")
    bar.on_fit_start(trainer, _MODULE)
    bar.on_train_start(trainer, _MODULE)
    for epoch in range(epochs):
        run.current_epoch, run.batch_idx = epoch, 0
        bar.on_train_epoch_start(trainer, _MODULE)
        for index in range(batches):
            time.sleep(pause)
            run.micro_batches += 1
            run.batch_idx += 1
            bar.on_train_batch_end(trainer, _MODULE, {}, None, index)
        bar.on_train_epoch_end(trainer, _MODULE)
    bar.on_train_end(trainer, _MODULE)
    bar.teardown(trainer, _MODULE, "fit")


@pytest.mark.parametrize("kind", [ProgressBar, pytest.param(RichProgressBar, marks=requires_package("rich"))])
def test_on_a_terminal_it_refreshes_by_the_clock_and_not_by_the_step(kind: type[ProgressBar]) -> None:
    # H-01
    terminal = _Terminal()
    run = _CountingRun(num_training_batches=20_000, max_epochs=1)
    start = time.monotonic()
    _train(kind(stream=terminal), run, epochs=1, batches=20_000, pause=0)
    # In twenty thousand steps the metrics are read ten times per second, and at the start and the end.
    assert 2 <= run.reads <= 10 * (time.monotonic() - start) + 2
    text = terminal.getvalue()
    assert "20000/20000" in text or "1/20000" in text
    assert re.search(r"Epoch 1/1: 20000 batches, 0:\d\d, [\d.]+ it/s, loss=0.1235\n$", text)


def test_a_slower_refresh_rate_holds() -> None:
    terminal = _Terminal()
    run = _CountingRun(num_training_batches=100)
    _train(ProgressBar(refresh_rate=2, stream=terminal), run, epochs=1, batches=100, pause=0.006)
    assert 3 <= run.reads <= 5


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar, ProgressLines])
def test_where_output_is_no_terminal_there_is_one_line_an_epoch(kind: type[ProgressBar]) -> None:
    output = io.StringIO()
    run = _CountingRun(num_training_batches=50, max_epochs=3)
    _train(kind(stream=output), run, epochs=3, batches=50)
    lines = output.getvalue().splitlines()
    assert len(lines) == 3
    for epoch, line in enumerate(lines):
        assert re.fullmatch(rf"Epoch {epoch + 1}/3: 50 batches, 0:00, [\d.]+ it/s, loss=0\.1235", line)
    assert run.reads == 3
    assert "\r" not in output.getvalue()
    assert "\x1b" not in output.getvalue()


@requires_package("rich")
@pytest.mark.parametrize("leave", [True, False])
def test_a_finished_epochs_bar_is_left_where_that_was_asked_for(leave: bool) -> None:
    terminal = _Terminal()
    _train(RichProgressBar(stream=terminal, leave=leave), _CountingRun(num_training_batches=5), epochs=2, batches=5)
    screen = Screen(80)
    screen.feed(terminal.getvalue().replace("\n", "\r\n"))
    expected = [["Epoch 1/10 ━", "Epoch 1/10: "], ["Epoch 2/10 ━", "Epoch 2/10: "]]
    assert [line[:12] for line in screen.lines] == [part for epoch in expected for part in epoch[not leave :]]


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar, ProgressLines])
def test_other_ranks_are_silent(kind: type[ProgressBar]) -> None:
    control = LocalControl()
    control.rank = 1
    output = _Terminal()
    run = _CountingRun(strategy=FakeStrategy(control=control))
    _train(kind(stream=output), run, epochs=2, batches=5)
    assert output.getvalue() == ""
    assert run.reads == 0


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])
def test_evaluations_leave_a_line_when_they_stand_alone(kind: type[ProgressBar], terminal: bool) -> None:
    output = _Terminal() if terminal else io.StringIO()
    run: Any = FakeRun(num_val_batches=[2, 3], num_test_batches=[4], num_predict_batches=[float("inf")])
    bar = kind(stream=output)
    for stage, batches in (("validation", 5), ("test", 4), ("predict", 6)):
        bar.setup(run, _MODULE, stage)
        run.testing, run.predicting = stage == "test", stage == "predict"
        getattr(bar, f"on_{stage}_start")(run, _MODULE)
        for index in range(batches):
            getattr(bar, f"on_{stage}_batch_end")(run, _MODULE, None, None, index)
        getattr(bar, f"on_{stage}_end")(run, _MODULE)
        bar.teardown(run, _MODULE, stage)
    text = output.getvalue()
    for line in ("Validation: 5 batches, ", "Test: 4 batches, ", "Prediction: 6 batches, "):
        assert text.count(line) == 1
    if terminal:
        assert "/5" in text
        assert "/4" in text


def test_a_validation_within_training_is_not_training_time() -> None:
    output = _Terminal()
    run: Any = FakeRun(num_val_batches=[1], num_training_batches=10)
    bar = ProgressBar(stream=output)
    bar.setup(run, _MODULE, "fit")
    run.sanity_checking = True
    bar.on_validation_start(run, _MODULE)
    bar.on_validation_batch_end(run, _MODULE, None, None, 0)
    bar.on_validation_end(run, _MODULE)
    run.sanity_checking = False
    assert "Sanity check" in output.getvalue()
    assert "\n" not in output.getvalue()
    bar.on_train_epoch_start(run, _MODULE)
    for index in range(10):
        time.sleep(0.005)
        bar.on_train_batch_end(run, _MODULE, {}, None, index)
    bar.on_validation_start(run, _MODULE)
    time.sleep(1.0)
    bar.on_validation_batch_end(run, _MODULE, None, None, 0)
    bar.on_validation_end(run, _MODULE)
    bar.on_train_epoch_end(run, _MODULE)
    assert "Validation" in output.getvalue()
    last = output.getvalue().splitlines()[-1]
    rate = re.search(r"([\d.]+) it/s", last)
    assert rate is not None
    assert float(rate[1]) > 20  # with the second of validation it would be below 10


def test_an_epoch_resumed_in_its_middle_counts_from_there() -> None:
    output = io.StringIO()
    run: Any = FakeRun(num_training_batches=10, current_epoch=4, micro_batches=46, batch_idx=6)
    bar = ProgressBar(stream=output)
    bar.setup(run, _MODULE, "fit")
    bar.on_train_start(run, _MODULE)  # and no on_train_epoch_start
    for index in range(6, 10):
        time.sleep(0.01)
        bar.on_train_batch_end(run, _MODULE, {}, None, index)
    bar.on_train_epoch_end(run, _MODULE)
    rate = re.fullmatch(r"Epoch 5/10: 10 batches, 0:00, ([\d.]+) it/s\n", output.getvalue())
    assert rate is not None
    assert float(rate[1]) < 101


def test_the_bar_of_an_epoch_that_max_steps_cuts_short_ends_there() -> None:
    output = _Terminal()
    bar = ProgressBar(stream=output)
    _train(bar, _CountingRun(num_training_batches=100, max_steps=7, global_step=4, accumulate_grad_batches=2), 1, 6)
    totals = set(re.findall(r"/(\d+) \[", output.getvalue()))
    assert totals == {"6"}


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar])
def test_a_line_is_written_above_the_bar_and_a_failure_takes_it_down(kind: type[ProgressBar]) -> None:
    output = _Terminal()
    run: Any = FakeRun()
    bar = kind(stream=output)
    bar.setup(run, _MODULE, "fit")
    bar.on_train_epoch_start(run, _MODULE)
    bar.on_train_batch_end(run, _MODULE, {}, None, 0)
    bar.write("[bold] a line")
    bar.on_train_batch_end(run, _MODULE, {}, None, 1)
    assert "[bold] a line" in output.getvalue()
    bar.teardown(run, _MODULE, "fit")
    after = output.getvalue()
    assert after.endswith("\r\x1b[J")  # the line is cleared, so that a traceback starts on an empty line
    bar.on_train_batch_end(run, _MODULE, {}, None, 2)
    assert output.getvalue() == after


@requires_package("rich")
def test_the_default_suits_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(default_progress_bar()) is ProgressLines
    monkeypatch.setattr(sys, "stdout", _Terminal())
    assert type(default_progress_bar()) is RichProgressBar
    monkeypatch.setitem(sys.modules, "rich", None)  # makes the import fail
    assert type(default_progress_bar()) is ProgressBar
    # G-06
    with pytest.raises(ConfigurationError, match="pip install"):
        RichProgressBar()


def test_without_a_terminal_it_is_absent_from_the_step() -> None:
    # H-01
    run: Any = FakeRun()
    table = HookTable(run, _MODULE, [ProgressLines()])
    assert not any(getattr(table, name) for name in HOOKS if "batch" in name)
    table = HookTable(run, _MODULE, [ProgressBar()])
    assert [name for name in HOOKS if "batch" in name and getattr(table, name)] == [
        "on_train_batch_end",
        "on_validation_batch_end",
        "on_test_batch_end",
        "on_predict_batch_end",
    ]
    assert isinstance(ProgressLines(), Callback)


def test_a_dumb_terminal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = ProgressBar(stream=_Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert bar.is_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert not bar.is_terminal()


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar, ProgressLines])
def test_a_bar_can_be_sent_to_another_process(kind: type[ProgressBar]) -> None:
    bar = kind()
    run: Any = FakeRun()
    bar.setup(run, _MODULE, "fit")
    bar.on_train_epoch_start(run, _MODULE)
    bar.on_train_batch_end(run, _MODULE, {}, None, 0)
    assert isinstance(pickle.loads(pickle.dumps(bar)), kind)


def test_numbers_read_well() -> None:
    assert [format_time(value) for value in (5.9, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
    assert [format_rate(value) for value in (0.5, 12.34, 0.0)] == ["2.00 s/it", "12.3 it/s", "0.0 it/s"]
    assert [format_number(value) for value in (3.0, 0.12345, 1e-7, float("nan"), float("inf"), 1e9)] == [
        "3",
        "0.1235",
        "1e-07",
        "nan",
        "inf",
        "1e+09",
    ]


@pytest.mark.parametrize("rate", [0, -1, 11])
def test_refresh_rates_out_of_range_are_refused(rate: float) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="refresh_rate"):
        ProgressBar(refresh_rate=rate)
