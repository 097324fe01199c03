"""The progress bar of a real run, on a real (pseudo-)terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing import requires_linux, requires_package

pytestmark = pytest.mark.slow

_SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
if {without_rich}:
    sys.modules["rich"] = None
from callback_modules import Regression, loader, quiet_fit

class Talking(Regression):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        if batch_idx == 3:
            self.print("a line from the step")
            print("a plain print")
        if {fails} and batch_idx == 5:
            raise ValueError("a failure in the step")
        return super().training_step(batch, batch_idx)

fit = quiet_fit(max_epochs=2, enable_progress_bar=True, enable_model_summary=True, num_sanity_val_steps=1)
fit.fit(Talking(), loader(80), loader(8))
print("after the run")
"""


def _script(without_rich: bool = False, fails: bool = False) -> list[str]:
    code = _SCRIPT.format(here=str(Path(__file__).parent), without_rich=without_rich, fails=fails)
    return [sys.executable, "-c", code]


def _on_a_terminal(command: list[str]) -> tuple[str, int]:
    """Run ``command`` with a pseudo-terminal for its output; return what it wrote and its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux's way to say that nobody holds the other end any more
            break
        if not part:
            break
        written += part
    os.close(ours)
    return written.decode(), process.wait(timeout=60)


_LINE = r"Epoch {}/2: 20 batches, 0:0\d, [\d.]+ it/s, train_loss=[\d.]+"


@requires_linux()
@pytest.mark.parametrize("without_rich", [True, pytest.param(False, marks=requires_package("rich"))])
def test_on_a_terminal_a_line_is_rewritten_and_what_is_printed_stays_readable(without_rich: bool) -> None:
    text, code = _on_a_terminal(_script(without_rich))
    assert code == 0, text
    # More refreshes than epochs, fewer than steps: it goes by the clock.
    refreshes = len(re.findall(r"\d+/20", text))
    assert 4 <= refreshes <= 60
    # Escape sequences aside, each of these is whole on a line of its own.
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1].strip() for line in re.split(r"\r?\n", text)]
    for epoch in (1, 2):
        assert any(re.fullmatch(_LINE.format(epoch), line) for line in lines), lines
    assert "after the run" in lines
    assert "a line from the step" in lines
    assert any("a plain print" in line for line in lines)
    assert any(line.startswith("5 parameters") for line in lines)
    assert ("━" in text) is not without_rich


@requires_linux()
def test_a_failure_leaves_the_terminal_usable() -> None:
    text, code = _on_a_terminal(_script(fails=True))
    assert code != 0
    assert "ValueError: a failure in the step" in re.sub(r"\x1b\[[\d;]*m", "", text)  # Python 3.13 colours it
    assert "\x1b[?25l" not in text  # the cursor was never hidden, and is there after a SIGKILL too
    assert text.rfind("━") < text.rfind("\r\x1b[J") < text.index("Traceback")


def test_in_a_pipe_there_is_one_line_an_epoch_and_no_control_character() -> None:
    result = subprocess.run(_script(), capture_output=True, text=True, timeout=120, check=True)
    lines = result.stdout.splitlines()
    assert sum(bool(re.fullmatch(_LINE.format(r"\d"), line)) for line in lines) == 2
    assert not re.search(r"[\x1b\r]", result.stdout)
    assert lines.count("a line from the step") == lines.count("a plain print") == 2
