"""A run continues if its progress cannot be printed (L-09)."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit

# Private: replaces the terminal by one that fails.
from drivetrain._runtime import terminal_output
from drivetrain._runtime.terminal_output import write_output
from drivetrain.callbacks import progress_bar


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


class Gone(io.StringIO):
    """Fails like a pipe without a reader or the terminal of a lost connection."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class GoneTerminal(Gone):
    def isatty(self) -> bool:
        return True


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


@pytest.mark.parametrize("make", [FullDisk, Gone, GoneTerminal, closed, AsciiTerminal, OnlyWrites, lambda: None])
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
    assert len(warnings) == (make in (FullDisk, Gone, GoneTerminal, closed))
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
