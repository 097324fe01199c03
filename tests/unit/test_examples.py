"""The examples, run as a user runs them, with small settings: they learn, and print the promised results."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from drivetrain.testing import requires_package
from warm_python import hints_in, run_program, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str, folder: Path) -> str:
    starts_processes = example == "fsdp_from_meta.py" or "2" in arguments
    code, printed = (run_program if starts_processes else run_script)(EXAMPLES / example, *arguments, folder=folder)
    assert code == 0, printed
    assert "Traceback" not in printed
    assert hints_in(printed) == []
    return printed


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern!r} is not in:\n{text}"
    return float(found[1].replace(",", ""))


@requires_package("sklearn")
def test_digits_is_right_on_95_percent_of_unseen_images(tmp_path: Path) -> None:
    printed = run("digits.py", "--devices", "2", "--max-epochs", "15", folder=tmp_path)
    assert number(r"held-out digits are classified correctly: ([\d.]+)%", printed) >= 95
    assert printed.count("held-out digits are classified correctly") == 1


@requires_package("sklearn")
def test_gan_draws_images_that_are_digits_on_average(tmp_path: Path) -> None:
    untrained = number(r"differs by ([\d.]+) from", run("gan.py", "--max-epochs", "0", folder=tmp_path))
    printed = run("gan.py", "--max-epochs", "20", folder=tmp_path)
    assert number(r"differs by ([\d.]+) from", printed) < untrained / 2
    assert len(printed.splitlines()[-1]) <= 6 * 16 + 5 * 3
    assert "@@" in printed


GPT_STEPS = 24


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Path]]:
    """Return a function that runs the GPT, and gives its output and folder."""

    @cache
    def ran(strategy: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp("gpt")
        options = ["--accelerator", "cpu", "--max-steps", str(GPT_STEPS)]
        if strategy != "one process":
            options += ["--strategy", strategy, "--devices", "2", "--precision", "64-true"]
        return run("gpt_stdlib.py", *options, folder=folder), folder

    return ran


@pytest.mark.parametrize("name", ["one process", "ddp"])
def test_gpt_learns_and_prints_its_loss(name: str, gpt: Callable[[str], tuple[str, Path]]) -> None:
    printed, where = gpt(name)
    before = number(r"before: loss ([\d.]+) nats", printed)
    after = number(r"after: loss ([\d.]+) nats", printed)
    assert before > 5
    assert after < 3.3
    assert number(r"after: loss .* nats, ([\d.]+) bits", printed) == pytest.approx(after / 0.693147, abs=2e-3)
    assert number(r"Throughput: ([\d,]+) bytes", printed) > 0
    assert "Before training it writes" in printed
    assert f"After {GPT_STEPS} steps it writes" in printed
    # L-09: the output is readable, and states the remaining files and the next command
    shown = [line for line in printed.splitlines() if line.startswith("    ")]
    assert all(len(line) <= 110 and line.isprintable() for line in shown), shown
    folder = re.search(r"Files in (.*):\n((?:    .*\n)+)", printed)
    assert folder is not None
    for name in re.findall(r"^    (\S+)", folder[2], re.MULTILINE):
        assert (where / folder[1] / name).exists()
    assert "--strategy" in printed.partition("What to run next:")[2]
    command = re.search(r"checkpoint show (.*)", printed)
    assert command is not None
    assert (where / command[1]).is_dir()
    table = (where / folder[1] / "metrics.csv").read_text().splitlines()
    assert {"step", "loss", "lr-AdamW"} <= set(table[0].split(","))
    assert [path.name for path in (where / "runs" / "gpt_stdlib").iterdir()] == ["version_0"]


def test_gpt_has_the_same_result_under_fsdp_and_ddp(gpt: Callable[[str], tuple[str, Path]]) -> None:
    # In float64, so that a different order of sums has no visible effect.
    losses = []
    for strategy in ("ddp", "fsdp"):
        _, folder = gpt(strategy)
        with open(folder / "runs" / "gpt_stdlib" / "version_0" / "metrics.csv") as table:
            found = [float(row["held_out_loss"]) for row in csv.DictReader(table) if row["held_out_loss"]]
        assert found[-1] < found[0] - 1
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def test_fsdp_from_meta_never_holds_the_whole(tmp_path: Path) -> None:
    printed = run("fsdp_from_meta.py", folder=tmp_path)
    whole = number(r"The whole model is ([\d.]+) MiB", printed)
    held = re.findall(r"Rank \d holds ([\d.]+) MiB, and its memory grew by at most ([\d.]+) MiB", printed)
    assert len(held) == 2
    for shard, peak in held:
        assert float(shard) == pytest.approx(whole / 2, abs=0.1)
        assert float(peak) < whole
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", printed)]
    assert losses[0] > 5
    assert losses[-1] < 4
    assert (tmp_path / "runs" / "fsdp_from_meta" / "manifest.json").exists()
