"""The progress bar on a terminal, by a clock that stands still but for the module's steps."""

from __future__ import annotations

import io
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from callback_modules import Clock, Timed, failing, loader, quiet_fit, saving
from terminal_screen import Terminal

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import LambdaCallback, ProgressBar, RichProgressBar, progress_bar

# Private because users get it only as the default.
from drivetrain.callbacks._progress_default import ProgressLines
from drivetrain.testing import requires_package

KINDS = pytest.mark.parametrize("kind", [ProgressBar, pytest.param(RichProgressBar, marks=requires_package("rich"))])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "_now", clock.monotonic)
    monkeypatch.setenv("TERM", "xterm")
    return clock


class Printing(Timed):
    """Prints in some steps, and makes its terminal narrower in the second epoch."""

    def __init__(self, clock: Clock, terminal: Terminal) -> None:
        super().__init__(clock)
        self.terminal = terminal

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            self.print("a line from the step")
            print("a plain", end="")  # no bar is drawn before the line is complete
        if batch_idx == 4:
            print(" print")
            print("from the module to stderr", file=sys.stderr)
        if (self.current_epoch, batch_idx) == (1, 6):
            self.terminal.resize(60)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("has_rich", [False, pytest.param(True, marks=requires_package("rich"))])
def test_what_is_printed_stays_readable(has_rich: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:  # L-09
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    fit = quiet_fit(max_epochs=2, enable_progress_bar=True, num_sanity_val_steps=1)
    fit.fit(Printing(clock, terminal), loader(), loader(12))
    print("after the run")
    # No bar is left over, and all printed and logged lines are complete.
    printed = ["a line from the step", "a plain print", "from the module to stderr"]
    ends = [rf"Epoch {epoch}/2: 10 batches, 0:10, 1.0 it/s.*, train_loss=\S+, val_loss=1" for epoch in (1, 2)]
    expected = [*printed, ends[0], *printed, ends[1], "after the run"]
    lines = terminal.screen.paragraphs
    assert re.fullmatch("\n".join(expected), "\n".join(lines[-len(expected) :])), lines
    # Each frame has one bar of each kind, within the width of the terminal.
    kinds = r"Epoch \d/2 |Validation |Sanity check "
    bars = [[line for line in frame if re.match(kinds, line)] for frame in terminal.frames]
    assert all(len({line.split()[0] for line in frame}) == len(frame) for frame in bars)
    evaluated = [line for frame in bars for line in frame if line.startswith(("Validation", "Sanity"))]
    assert {line.split()[0] for line in evaluated} == {"Validation", "Sanity"}
    assert any("val_loss=" in line for line in evaluated)
    assert not any("train_loss" in line or "run" in line for line in evaluated)
    above = [frame[0] for frame in bars if len(frame) == 2 and frame[1].startswith("Validation")]
    assert any("10/10" in line for line in above) is has_rich  # the full bar of the epoch
    last = [line for frame in bars for line in frame if line.startswith("Epoch 2/2")]
    assert any(re.search(r"run \d+:\d\d left", line) for line in last)
    assert any(len(line) > 60 for line in last)
    assert len(last[-1]) < 60
    assert ("━" in terminal.getvalue()) is has_rich


@KINDS
@pytest.mark.parametrize(("refresh_rate", "reads"), [(8, 16 + 2), (2, 4 + 2)])
def test_it_refreshes_by_the_clock_and_not_by_the_step(
    kind: type[ProgressBar], refresh_rate: int, reads: int, clock: Clock
) -> None:  # H-01
    class Quick(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.clock.now -= 1 - 1 / 64
            return super().training_step(batch, batch_idx)

    counted: list[int] = []

    class Counting(kind):  # type: ignore[misc, valid-type]
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            counted.append(trainer.batch_idx)
            return super().get_metrics(trainer, module)

    terminal = Terminal()
    quiet_fit(callbacks=Counting(refresh_rate, terminal)).fit(Quick(clock), loader(128, 1))
    assert abs(len(counted) - reads) <= 1
    assert re.search(r"Epoch 1/1: 128 batches, 0:02, 64\.0 it/s, train_loss=\S+\n$", terminal.getvalue())


@requires_package("rich")
@pytest.mark.parametrize("leave", [True, False])
def test_a_finished_epochs_bar_is_left_where_that_was_asked_for(leave: bool, clock: Clock) -> None:
    terminal = Terminal()
    quiet_fit(max_epochs=2, callbacks=RichProgressBar(stream=terminal, leave=leave)).fit(Timed(clock), loader())
    expected = [["Epoch 1/2 ━", "Epoch 1/2: "], ["Epoch 2/2 ━", "Epoch 2/2: "]]
    assert [line[:11] for line in terminal.screen.lines] == [part for epoch in expected for part in epoch[not leave :]]


@KINDS
@pytest.mark.parametrize("make", [Terminal, io.StringIO])
def test_evaluations_leave_a_line(kind: type[ProgressBar], make: type[io.StringIO], clock: Clock) -> None:
    output = make()
    fit, module = quiet_fit(callbacks=kind(stream=output)), Timed(clock)
    fit.validate(module, loader(20))
    fit.test(module, [loader(8), loader(8)])
    fit.predict(module, [loader(4)] * 6)
    lines = ("Validation: 5 batches, 0:10", "Test: 4 batches, 0:08", "Prediction: 6 batches, 0:12")
    assert [output.getvalue().count(line) for line in lines] == [1, 1, 1]
    assert ("1/5" in output.getvalue() and "1/4" in output.getvalue()) is (make is Terminal)


def test_an_epoch_resumed_in_its_middle_counts_from_there(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        quiet_fit(callbacks=[saving(6, tmp_path / "saved"), failing(7)]).fit(Timed(clock), loader())
    output = io.StringIO()
    quiet_fit(callbacks=ProgressBar(stream=output)).fit(Timed(clock), loader(), ckpt_path=tmp_path / "saved")
    assert output.getvalue().startswith("Epoch 1/1: 10 batches, 0:04, 1.0 it/s")


def test_the_bar_of_an_epoch_that_max_steps_cuts_short_ends_there(clock: Clock) -> None:
    output = Terminal()
    quiet_fit(max_steps=3, accumulate_grad_batches=2, callbacks=ProgressBar(stream=output)).fit(Timed(clock), loader())
    assert set(re.findall(r"/(\d+) \[", output.getvalue())) == {"6"}


@KINDS
def test_a_line_is_written_above_the_bar_and_a_failure_takes_it_down(kind: type[ProgressBar], clock: Clock) -> None:
    output = Terminal()
    bar = kind(stream=output)
    write = LambdaCallback(on_train_batch_end=lambda *arguments: bar.write("[bold] a line"))
    with pytest.raises(RuntimeError, match="out of luck"):
        quiet_fit(callbacks=[bar, write, failing(3)]).fit(Timed(clock), loader())
    assert output.getvalue().count("[bold] a line") == 3
    assert output.getvalue().endswith("\r\x1b[J")  # the line is cleared, so that a traceback starts on an empty line


@requires_package("rich")
def test_the_default_suits_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def default() -> type:
        return type(quiet_fit(enable_progress_bar=True).progress_bar_callback)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert default() is ProgressLines
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert default() is RichProgressBar
    monkeypatch.setenv("TERM", "dumb")
    assert default() is ProgressLines
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert default() is ProgressBar
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich", None)  # makes the import fail
    assert default() is ProgressBar
    # G-06
    with pytest.raises(ConfigurationError, match="pip install"):
        RichProgressBar()


def test_without_a_terminal_it_is_absent_from_the_step() -> None:  # H-01
    for stage in ("train", "validation", "test", "predict"):
        name = f"on_{stage}_batch_end"
        assert getattr(ProgressLines, name) is getattr(Callback, name)
        assert getattr(ProgressBar, name) is not getattr(Callback, name)


@pytest.mark.parametrize("kind", [ProgressBar, RichProgressBar, ProgressLines])
def test_a_bar_can_be_sent_to_another_process_after_a_run(kind: type[ProgressBar], tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as stream:
        bar = kind(stream=stream)
        quiet_fit(callbacks=bar).fit(Timed(Clock()), loader(4))
        assert isinstance(pickle.loads(pickle.dumps(bar)), kind)
