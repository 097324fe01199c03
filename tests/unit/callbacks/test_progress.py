"""ProgressBar: on a terminal, and the lines that it prints if the output is no terminal or fails (L-09)."""

from __future__ import annotations

import fcntl
import io
import itertools
import logging
import math
import os
import pickle
import re
import struct
import sys
import termios
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from callback_modules import Clock, Regression, Timed, failing, loader, quiet_fit, saving
from torch.utils.data import DataLoader

from drivetrain import Callback, ConfigurationError
from drivetrain._runtime.console import write_output
from drivetrain.callbacks import LambdaCallback, ProgressBar, RichProgressBar, progress_bar
from drivetrain.callbacks._progress import Phase, TimeLeft, fit_line, format_number, format_rate, format_time
from drivetrain.callbacks.progress_bar import ProgressLines
from drivetrain.testing import requires_package


class Screen:
    """Interprets what a progress bar writes, as xterm, which does not wrap lines again after a resize."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._rows: list[str] = [""]
        self._row = self._column = 0
        self._wraps = True
        self._continuation_rows: set[int] = set()  # rows that continue the previous one

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self._rows if row.strip()]

    @property
    def paragraphs(self) -> list[str]:
        """The lines that were written, with wrapped rows joined."""
        lines: list[str] = []
        for index, row in enumerate(self._rows):
            if index in self._continuation_rows:
                lines[-1] += row
            else:
                lines.append(row)
        return [line.rstrip() for line in lines if line.strip()]

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", text):
            self._process(part)

    def _process(self, part: str) -> None:
        if part == "\r":
            self._column = 0
        elif part == "\n":
            self._column = 0
            self._down()
        elif part in ("\x1b[K", "\x1b[J"):
            self._rows[self._row] = self._rows[self._row][: self._column]
            if part == "\x1b[J":
                del self._rows[self._row + 1 :]
        elif re.fullmatch(r"\x1b\[\d*A", part):
            self._row -= int(part[2:-1] or 1)
            assert self._row >= 0
        elif part in ("\x1b[?7l", "\x1b[?7h"):
            self._wraps = part[-1] == "h"
        elif not re.fullmatch(r"\x1b\[[\d;]*m", part):  # a color
            assert part.isprintable(), repr(part)
            self._put(part)

    def _put(self, character: str) -> None:
        if self._column >= self.columns:
            if self._wraps:
                self._column = 0
                self._down()
                self._continuation_rows.add(self._row)
            else:
                self._column = self.columns - 1
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        self._continuation_rows.discard(self._row)
        if self._row == len(self._rows):
            self._rows.append("")


class Terminal(io.StringIO):
    """A text stream that is a terminal. ``frames`` are the lines on its screen after each write."""

    def __init__(self, columns: int = 100) -> None:
        super().__init__()
        self.screen = Screen(columns)
        self.frames: list[list[str]] = []
        self._descriptors = os.openpty()  # has the size
        self.resize(columns)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptors[1]

    def write(self, text: str) -> int:
        self.screen.feed(text)
        self.frames.append(self.screen.lines)
        return super().write(text)

    def resize(self, columns: int) -> None:
        self.screen.columns = columns
        fcntl.ioctl(self.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def close(self) -> None:
        if not self.closed:
            for descriptor in self._descriptors:
                os.close(descriptor)
        super().close()


KINDS = pytest.mark.parametrize("kind", [ProgressBar, pytest.param(RichProgressBar, marks=requires_package("rich"))])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setenv("TERM", "xterm")
    return Clock(monkeypatch, "drivetrain.callbacks.progress_bar._now")


@pytest.mark.parametrize("has_rich", [False, pytest.param(True, marks=requires_package("rich"))])
def test_what_is_printed_stays_readable(has_rich: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:  # L-09
    class Printing(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                self.print("a line from the step")
                print("a plain", end="")  # no bar is drawn before the line is complete
            if batch_idx == 4:
                print(" print")
                print("from the module to stderr", file=sys.stderr)
                logging.getLogger("drivetrain").warning("a logged line")
            if (self.current_epoch, batch_idx) == (1, 6):
                terminal.resize(60)
            return super().training_step(batch, batch_idx)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.getLogger("drivetrain"), "propagate", False)  # as if nothing had configured logging
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    fit = quiet_fit(max_epochs=2, enable_progress_bar=True, num_sanity_val_steps=1)
    fit.fit(Printing(clock), loader(), loader(12))
    print("after the run")
    # No bar is left over, and all printed and logged lines are complete.
    printed = ["a line from the step", "a plain print", "from the module to stderr", "a logged line"]
    ends = [rf"Epoch {epoch}/2: 10 batches, 0:10, 1.0 it/s.*, train_loss=\S+, val_loss=1" for epoch in (1, 2)]
    expected = [*printed, ends[0], *printed, ends[1], "The run ended: max_epochs=2 is reached .*", "after the run"]
    lines = terminal.screen.paragraphs
    assert re.fullmatch("\n".join(expected), "\n".join(lines[-len(expected) :])), lines
    # Each frame has one bar of each kind, within the width of the terminal.
    kinds = r"Epoch \d/2 |Validation |Sanity check "
    bars = [[line for line in frame if re.match(kinds, line)] for frame in terminal.frames]
    assert all(len({line.split()[0] for line in frame}) == len(frame) for frame in bars)
    evaluated = [line for frame in bars for line in frame if line.startswith(("Validation", "Sanity"))]
    assert {line.split()[0] for line in evaluated} == {"Validation", "Sanity"}
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
def test_it_refreshes_by_the_clock_and_not_by_the_step(kind: Any, refresh_rate: int, reads: int, clock: Clock) -> None:
    # H-01
    class Quick(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.clock.now -= 1 - 1 / 64
            return super().training_step(batch, batch_idx)

    counted: list[int] = []

    class Counting(kind):
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


def test_a_part_of_an_epoch_counts_as_long_as_it_is(clock: Clock, tmp_path: Path) -> None:
    cut_short = Terminal()
    bar = ProgressBar(stream=cut_short)
    options: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 2}
    quiet_fit(callbacks=[bar, saving(3, tmp_path / "saved")], **options).fit(Timed(clock), loader())
    assert set(re.findall(r"/(\d+) \[", cut_short.getvalue())) == {"6"}
    resumed = io.StringIO()
    bar = ProgressBar(stream=resumed)
    quiet_fit(callbacks=bar, accumulate_grad_batches=2).fit(Timed(clock), loader(), ckpt_path=tmp_path / "saved")
    assert resumed.getvalue().startswith("Epoch 1/1: 10 batches, 0:04, 1.0 it/s")


def test_it_counts_up_to_the_size_of_the_epoch(clock: Clock) -> None:  # S-03
    samples: Any = [(torch.ones(4), torch.ones(1))] * 2

    class Grows(Timed):
        def on_train_epoch_start(self) -> None:
            samples.extend(samples)

    terminal = Terminal()
    quiet_fit(max_epochs=2, callbacks=ProgressBar(stream=terminal)).fit(Grows(clock), DataLoader(samples, 2))
    assert set(re.findall(r"Epoch (\d)/2 .*?/(\d+) \[", terminal.getvalue())) == {("1", "2"), ("2", "4")}


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
    monkeypatch.setattr(sys, "stdout", AsciiTerminal())
    assert default() is ProgressBar
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich", None)  # makes the import fail
    assert default() is ProgressBar
    with pytest.raises(ConfigurationError, match="pip install"):  # G-06
        RichProgressBar()
    for stage in ("train", "validation", "test", "predict"):  # H-01: without a terminal it is absent from the step
        name = f"on_{stage}_batch_end"
        assert getattr(ProgressLines, name) is getattr(Callback, name)


@pytest.mark.parametrize("kind", [ProgressLines, ProgressBar, RichProgressBar])
def test_a_file_gets_a_line_at_the_log_interval_or_half_a_minute(kind: Any, clock: Any, tmp_path: Path) -> None:  # L-09
    with (tmp_path / "out").open("w+") as out:
        bar = kind(stream=out)
        trainer = quiet_fit(max_epochs=2, callbacks=bar, log_every_n_steps=10, enable_progress_bar=True)
        trainer.fit(Timed(clock), loader(100, 1), loader(20, 1))  # 100 steps of 1 s and 20 batches of 2 s in each epoch
        assert isinstance(pickle.loads(pickle.dumps(bar)), kind)  # a launcher sends it to another process
    text = (tmp_path / "out").read_text()
    assert [line.partition(", train_loss=")[0] for line in text.splitlines()] == [
        "Epoch 1/2: step 30, 30/100 batches, 0:30, 1.0 it/s, run 2:50 left",
        "Epoch 1/2: step 60, 60/100 batches, 1:00, 1.0 it/s, run 2:20 left",
        "Epoch 1/2: step 90, 90/100 batches, 1:30, 1.0 it/s, run 1:50 left",
        # Half a minute after the last line; the pace includes the validations so far.
        "Validation: 10/20 batches, 0:20, 2.00 s/it, 0:20 left",
        "Epoch 1/2: 100 batches, 1:40, 1.0 it/s, run 2:37 left",
        "Epoch 2/2: step 130, 30/100 batches, 0:30, 1.0 it/s, run 1:38 left",
        "Epoch 2/2: step 160, 60/100 batches, 1:00, 1.0 it/s, run 0:52 left",
        "Epoch 2/2: step 190, 90/100 batches, 1:30, 1.0 it/s, run 0:12 left",
        "Validation: 10/20 batches, 0:20, 2.00 s/it, 0:20 left",
        "Epoch 2/2: 100 batches, 1:40, 1.0 it/s",
    ]
    assert not {"\r", "\x1b"} & set(text)


@pytest.mark.parametrize(
    ("interval", "lines"),
    [(50, ["step 50/120", "step 100/120", "120 batches"]), *((n, ["120 batches"]) for n in (0, 999))],
)
def test_lines_are_no_closer_than_the_log_interval(interval: int, lines: list[str], clock: Clock) -> None:  # L-09
    out = io.StringIO()
    fit = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=interval, max_steps=120, max_epochs=-1)
    fit.fit(Timed(clock), loader(200, 1))
    assert [line.partition(",")[0] for line in out.getvalue().splitlines()] == [f"Epoch 1: {line}" for line in lines]


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_a_long_evaluation_prints_its_progress_over_all_loaders(stage: str, clock: Clock) -> None:  # L-09
    out = io.StringIO()
    trainer = quiet_fit(callbacks=ProgressLines(stream=out), log_every_n_steps=5)
    getattr(trainer, stage)(Timed(clock), [loader(64), loader(64)])  # 32 batches of 2 s in all
    lines = [line.partition(",")[0].partition(" ")[2] for line in out.getvalue().splitlines()]
    assert lines == ["15/32 batches", "31/32 batches", "32 batches"]


def test_a_line_does_not_wait_for_a_device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-09, O-04: a line whose values have not arrived is printed at a later interval, with its own step
    class Late(progress_bar.NamedNumbers):
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
    run: Any = SimpleNamespace(num_training_batches=100, max_steps=-1, max_time=None, accumulate_grad_batches=1)
    run.__dict__.update({"current_epoch": 0, "global_step": 0, "micro_batches": 0, "batch_idx": 0, **options})
    left, made = TimeLeft(run, 0.0), options.get("made", 10)
    for micro_batches, now in ((1, 60.0), (1 + made, 60.0 + made)):  # the first takes a minute, the others a second
        run.micro_batches = run.batch_idx = micro_batches
        found = left.seconds(run, now)
    assert found == (None if seconds is None else pytest.approx(seconds))


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
        if width == 200:
            assert all(part in text for part in (run, *(f"{name}=" for name in shown)))
            assert (line.width == 24) is (total == 5678)


def test_numbers_read_well() -> None:
    times = {5.9: "0:05", 65: "1:05", 3725: "1:02:05", 86399: "23:59:59", 86400: "1d 0:00:00", 200000: "2d 7:33:20"}
    assert {value: format_time(value) for value in times} == times
    assert [format_rate(value) for value in (0.5, 12.34, 0.0)] == ["2.00 s/it", "12.3 it/s", "0.0 it/s"]
    numbers = {3.0: "3", 0.12345: "0.1235", 1e-7: "1e-07", math.nan: "nan", math.inf: "inf", 1e9: "1e+09"}
    assert {value: format_number(value) for value in numbers} == numbers


class Named(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("größe名", loss.detach(), prog_bar=True)
        return loss

    test_step = training_step


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


class GoneTerminal(Terminal):  # as of a lost connection
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class AsciiTerminal(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def isatty(self) -> bool:
        return True


class OnlyWrites:  # like objects that scripts use in place of `sys.stdout`
    text = ""

    def write(self, text: str) -> None:
        self.text += text


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [FullDisk, GoneTerminal, closed, AsciiTerminal, OnlyWrites, lambda: None])
def test_a_run_whose_output_fails_continues(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # L-09
    monkeypatch.setattr(progress_bar, "_LINE_INTERVAL", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = make()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        fit = quiet_fit(enable_progress_bar=True, enable_model_summary=True, log_every_n_steps=1)
        fit.fit(Named(), loader())
        fit.test(Named(), loader())
        assert sys.stdout is stream
    assert fit.state == "finished"
    if isinstance(stream, OnlyWrites):
        assert "größe名=" in stream.text
    if isinstance(stream, AsciiTerminal):
        stream.flush()
        shown = stream.buffer.getvalue()  # type: ignore[attr-defined]
        assert b"gr??e?=" in shown
        assert b"???" not in shown  # the plain bar
    if isinstance(stream, FullDisk):
        stream.flush = lambda: None  # type: ignore[method-assign]
        write_output(stream, "seen\n")  # the disk has free space again
        assert stream.getvalue().endswith("seen\n")
