"""The progress bar of a real run on a pseudo-terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from terminal_screen import Screen, run_in_terminal

from drivetrain.testing import requires_linux, requires_package

pytestmark = pytest.mark.slow

_SCRIPT = """
import logging, sys, time
sys.path.insert(0, {here!r})
if {without_rich}:
    sys.modules["rich"] = None
from callback_modules import Regression, loader, quiet_fit

class Talking(Regression):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        if batch_idx == 3:
            self.print("a line from the step")
        if batch_idx == 3:
            print("a plain", end="", flush=True)
            time.sleep(0.15)
            print(" print")
            print("from the module to stderr", file=sys.stderr)
            logging.getLogger("drivetrain").warning("what the engine says")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.06)
        self.log("val_loss", self.loss(batch), prog_bar=True)

fit = quiet_fit(max_epochs=2, enable_progress_bar=True, enable_model_summary=True, num_sanity_val_steps=1)
fit.fit(Talking(), loader(80), loader(24))
print("after the run")
"""


_LINE = r"Epoch {}/2: 20 batches, 0:0\d, [\d.]+ it/s(?:, run 0:\d\d left)?, train_loss=[\d.]+"


@requires_linux()
@pytest.mark.parametrize("without_rich", [True, pytest.param(False, marks=requires_package("rich"))])
def test_on_a_terminal_a_line_is_rewritten_and_what_is_printed_stays_readable(without_rich: bool) -> None:  # L-09
    resizes = iter([60])

    def resized(screen: Screen) -> int | None:
        return next(resizes, None) if screen.lines and re.match("Epoch 2/2 .*] run", screen.lines[-1]) else None

    script = _SCRIPT.format(here=str(Path(__file__).parent), without_rich=without_rich)
    screen, frames, text, code = run_in_terminal([sys.executable, "-c", script], 100, resized)
    assert code == 0, text
    # No bar is left over, and all printed and logged lines are complete.
    lines = screen.paragraphs
    lines = lines[next(index for index, line in enumerate(lines) if "in train mode" in line) + 1 :]  # below the summary
    end = "The run ended: max_epochs=2 is reached (2 epochs, 40 optimizer steps) after "
    printed = ["a line from the step", "a plain print", "from the module to stderr", "what the engine says"]
    epochs = [[*printed, f"{_LINE.format(epoch)}, val_loss=.*"] for epoch in (1, 2)]
    expected = [*epochs[0], *epochs[1], re.escape(end) + r"\d+\.\d s\.", "after the run"]
    assert re.fullmatch("\n".join(expected), "\n".join(lines)), lines
    # Each frame has one bar of each kind, within the width of the terminal.
    bars = [[line for line in frame if re.match(r"Epoch \d/2 |Validation |Sanity check ", line)] for frame in frames]
    assert all(len({line.split()[0] for line in frame}) == len(frame) for frame in bars)
    titles = {" ".join(line.split()[:2]) for frame in bars for line in frame}
    assert titles >= {"Epoch 1/2", "Epoch 2/2"}
    evaluated = [line for frame in bars for line in frame if line.startswith(("Validation", "Sanity"))]
    assert {line.split()[0] for line in evaluated} == {"Validation", "Sanity"}
    assert any("val_loss=" in line for line in evaluated)
    assert not any("train_loss" in line or "run" in line for line in evaluated)
    if not without_rich:  # the epoch's bar is full above that of its last validation
        assert any("20/20" in frame[0] and frame[1].startswith("Validation") for frame in bars if len(frame) == 2)
    assert any(re.search(r"run \d+:\d\d left", line) for frame in bars for line in frame)
    after = [line for frame in bars for line in frame if line.startswith("Epoch 2/2")]
    assert any(len(line) > 60 for line in after)
    assert len(after[-1]) < 60
    assert ("━" in text) is not without_rich
