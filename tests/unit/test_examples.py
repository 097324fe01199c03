"""The examples, run as a user runs them, with small settings: they learn, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing import requires_package

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern!r} is not in:\n{text}"
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("devices", [1, 2])
@requires_package("sklearn")
def test_digits_is_right_on_95_percent_of_unseen_images(devices: int, tmp_path: Path) -> None:
    printed = run("digits.py", "--devices", str(devices), "--max-epochs", "15", folder=tmp_path)
    assert number(r"held-out digits are right: ([\d.]+)%", printed) >= 95
    assert printed.count("held-out digits are right") == 1


@requires_package("sklearn")
def test_gan_draws_images_that_are_digits_on_average(tmp_path: Path) -> None:
    untrained = number(r"is ([\d.]+) from the real one", run("gan.py", "--max-epochs", "0", folder=tmp_path))
    printed = run("gan.py", "--max-epochs", "20", folder=tmp_path)
    assert number(r"is ([\d.]+) from the real one", printed) < untrained / 2
    assert len(printed.splitlines()[-1]) <= 6 * 16 + 5 * 3
    assert "@@" in printed


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--strategy", "ddp", "--devices", "2"],
        ["--strategy", "ddp_static_graph", "--devices", "2", "--precision", "bf16-mixed"],
    ],
    ids=["one process", "ddp", "static graph in bf16"],
)
def test_gpt_learns_and_says_how_well(options: list[str], tmp_path: Path) -> None:
    printed = run("gpt_stdlib.py", "--accelerator", "cpu", "--max-steps", "120", *options, folder=tmp_path)
    before = number(r"before: loss ([\d.]+) nats", printed)
    after = number(r"after: loss ([\d.]+) nats", printed)
    assert before > 5
    assert after < 2.9
    assert number(r"after: loss .* nats, ([\d.]+) bits", printed) == pytest.approx(after / 0.693147, abs=2e-3)
    assert number(r"Throughput: ([\d,]+) bytes", printed) > 0
    assert "Before training it writes" in printed
    assert "After 120 steps it writes" in printed
    assert "--strategy" in printed.splitlines()[-1]
    folder = re.search(r"The run's files: (.*)", printed)
    assert folder is not None
    table = (tmp_path / folder[1] / "metrics.csv").read_text().splitlines()
    assert {"step", "loss", "lr-AdamW"} <= set(table[0].split(","))
    assert [path.name for path in (tmp_path / "runs" / "gpt_stdlib").iterdir()] == ["version_0"]
