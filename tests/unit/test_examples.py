"""The examples and the recipes of the cookbook, run as a user runs them: they print the promised results."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing import requires_package
from warm_python import hints_in, run_program, run_script
from worlds import preload

preload("sklearn.datasets", "sklearn.model_selection")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = EXAMPLES / "cookbook"
COOKBOOK = ROOT / "docs" / "cookbook"

WITH_FILES = {"lora", "streaming_data"}  # checkpoints of the other recipes at every epoch would only take time


def run(example: str, *arguments: str, folder: Path) -> str:
    """Return what an example or a recipe prints."""
    script = EXAMPLES / example
    starts_processes = example == "fsdp_from_meta.py" or "2" in arguments
    with pytest.MonkeyPatch.context() as patch:
        if script.parent == RECIPES and script.stem not in WITH_FILES:
            patch.setenv("DRIVETRAIN_ENABLE_CHECKPOINTING", "false")
        code, printed = (run_program if starts_processes else run_script)(script, *arguments, folder=folder)
    assert code == 0, printed[-6000:]
    assert "Traceback" not in printed or script.parent == RECIPES
    assert hints_in(printed) == []
    return printed


def numbers(pattern: str, printed: str) -> list[float]:
    """Return the numbers at each ``#`` of the last match of ``pattern``."""
    found = re.findall(pattern.replace("#", r"(\d[\d.,]*(?:e[+-]?\d+)?)"), printed)
    assert found, f"{pattern!r} is not in:\n{printed[-3000:]}"
    return [float(number.replace(",", "")) for number in ([found[-1]] if isinstance(found[-1], str) else found[-1])]


def number(pattern: str, printed: str) -> float:
    return numbers(pattern, printed)[0]


@requires_package("sklearn")
def test_digits_is_right_on_95_percent_of_unseen_images(tmp_path: Path) -> None:
    printed = run("digits.py", "--devices", "2", "--max-epochs", "15", folder=tmp_path)
    assert number("held-out digits are classified correctly: #%", printed) >= 95
    assert printed.count("held-out digits are classified correctly") == 1


@requires_package("sklearn")
def test_gan_draws_images_that_are_digits_on_average(tmp_path: Path) -> None:
    untrained = number("differs by # from", run("gan.py", "--max-epochs", "0", folder=tmp_path))
    printed = run("gan.py", "--max-epochs", "20", folder=tmp_path)
    assert number("differs by # from", printed) < untrained / 2
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
    before = number("before: loss # nats", printed)
    after = number("after: loss # nats", printed)
    assert before > 5
    assert after < 3.3
    assert number("after: loss .* nats, # bits", printed) == pytest.approx(after / 0.693147, abs=2e-3)
    assert number("Throughput: # bytes", printed) > 0
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
    whole = number("The whole model is # MiB", printed)
    held = re.findall(r"Rank \d holds ([\d.]+) MiB, and its memory grew by at most ([\d.]+) MiB", printed)
    assert len(held) == 2
    for shard, peak in held:
        assert float(shard) == pytest.approx(whole / 2, abs=0.1)
        assert float(peak) < whole
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+)", printed)]
    assert losses[0] > 5
    assert losses[-1] < 4
    assert (tmp_path / "runs" / "fsdp_from_meta" / "manifest.json").exists()


def recipe(name: str, *patterns: str, holds: Callable[..., bool], needs: str = "") -> Any:
    """A recipe, what it prints with numbers at ``#``, and what holds for these numbers."""
    return pytest.param(name, patterns, holds, id=name, marks=[requires_package(each) for each in needs.split()])


@requires_package("sklearn")
@pytest.mark.parametrize(
    ("name", "patterns", "holds"),
    [
        recipe(
            "transfer_learning",
            *("from scratch: #%", "all at once: #%", "head first: #%"),
            holds=lambda scratch, at_once, head_first: scratch < at_once < head_first and head_first > 91,
        ),
        recipe(
            "gan", "lie # from the circle, in # of its 8", holds=lambda distance, parts: distance < 0.1 and parts == 8
        ),
        recipe(
            "ema_teacher",
            *("Accuracy without teacher: student #%", "Accuracy with teacher: student #%, average #%"),
            holds=lambda alone, student, teacher: min(student, teacher) > alone + 2,
        ),
        recipe(
            "lora",
            *("The loss is #, and was # at the start", "The adapter takes # bytes, the base model #"),
            holds=lambda after, before, adapter, base: after < before - 0.3 and adapter < base / 50,
            needs="peft",
        ),
        recipe(
            "several_optimizers",
            *(r"# of # parameters have trained; the learning rates ended at \[#, #\]", "Accuracy: #%"),
            holds=lambda trained, of, a, b, right: trained == of == 8 and max(a, b) < 1e-9 and right > 92,
        ),
        recipe(
            "streaming_data",
            "Pieces read: # in one run; # before a stop and # after it",
            holds=lambda whole, part, rest: part + rest == whole,
        ),
        recipe(
            "class_imbalance",
            *("Without weights: recall #%", "With weights: recall #%, false positive rate #%", "4 x 16 end within #"),
            holds=lambda plain, weighted, wrong, difference: weighted > 2 * plain and wrong < 5 and difference < 1e-5,
        ),
        recipe(
            "k_fold",
            *("# of # samples predicted, #% of them correctly", "Accuracy over 5 folds: [0-9.]+, standard deviation #"),
            holds=lambda made, of, right, deviation: made == of == 178 and right > 94 and deviation < 0.05,
        ),
        recipe(
            "optuna_sweep",
            "Accuracy #% with .*; # of # trials were pruned",
            holds=lambda accuracy, pruned, trials: accuracy > 88 and 1 <= pruned < trials == 10,
            needs="optuna",
        ),
        recipe(
            "ray_tune_sweep",
            "Accuracy #% with .*; [0-9]+ of # trials ended early",
            holds=lambda accuracy, trials: accuracy > 80 and trials == 4,
            needs="ray pandas",
        ),
        recipe(
            "logging_images",
            *(r"Images at steps \[#, #, #, #, #\], each 64 x 16", "Validation loss: #, the images' variance is #"),
            holds=lambda *found: found[:5] == (28, 56, 84, 112, 140) and found[5] < found[6] / 3,
            needs="tensorboard",
        ),
    ],
)
def test_a_recipe_prints_the_numbers_of_its_page(name: str, patterns: Any, holds: Any, tmp_path: Path) -> None:
    printed = run(f"cookbook/{name}.py", folder=tmp_path)
    found = [number for pattern in patterns for number in numbers(pattern, printed)]
    assert holds(*found), f"{found}\n{printed[-3000:]}"
    if name == "lora":
        assert "With another base model: " in printed
        assert "was trained on another base" in printed
    if name == "streaming_data":
        assert printed.splitlines()[-1] == "The weights are the same: True"


# Executes a notebook's cells in the same shell as a kernel, and then cells that fail.
RUN_CELLS = """
import json
import sys

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
shell.run_cell('''
import torch
from drivetrain import Fit, TrainModule

class Failing(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        raise ValueError("the " + "data is wrong")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=2)
''')
for options in ("", "strategy='ddp', devices=2, "):
    print("== cell", flush=True)
    shell.run_cell(f"Fit({options}accelerator='cpu', max_epochs=1, barebones=True).fit(Failing(), loader)")
"""


@requires_package("sklearn")
@requires_package("IPython")
def test_a_notebook_trains_on_two_processes_and_shows_an_error_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    script = tmp_path / "cells.py"
    script.write_text(RUN_CELLS)
    code, output = run_script(script, str(RECIPES / "notebook.ipynb"), folder=tmp_path)
    assert code == 0, output[-6000:]
    printed, *cells = output.split("== cell")
    assert hints_in(printed) == []
    ranks, steps, accuracy = numbers("# ranks, # steps, accuracy #%", printed)
    assert (ranks, steps) == (2, 140)
    assert accuracy > 80
    assert printed.splitlines()[-1] == "Losses in the list: 0, in the callback: 140"
    assert len(cells) == 2
    for shown in cells:
        assert len(re.findall("^ValueError: the data is wrong", shown, re.MULTILINE)) == 1, shown
        assert shown.count('raise ValueError("the " + "data is wrong")') == 1
        assert len(re.findall(r"Where: rank \d", shown)) == 1
        assert not re.search(r"Rank \d failed with", shown)


@requires_package("sklearn")
def test_the_recipe_for_pytest_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, whose fork server has already imported torch.
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", f"--rootdir={RECIPES}"]
    assert pytest.main([*options, str(RECIPES / "test_a_module.py")]) == pytest.ExitCode.OK
    sys.modules.pop("test_a_module")


@requires_package("sklearn")
def test_debugging_nan_finds_the_batch_and_the_operation(tmp_path: Path) -> None:
    printed = run("cookbook/debugging_nan.py", folder=tmp_path)
    lines = [line for line in printed.splitlines() if line.startswith(("The last loss", "Function"))]
    assert re.fullmatch(r"The last loss is [\d.]+, the weights are NaN", lines[0])
    assert "'SqrtBackward0' returned nan values" in lines[1]
    assert "at batch index 12" in lines[1]
    assert re.fullmatch(r"The last loss is [\d.]+, the weights are finite", lines[2])
    assert len(lines) == 3


RECIPE_FILES = sorted(path for path in RECIPES.iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize("recipe", RECIPE_FILES, ids=lambda path: path.stem)
def test_each_recipe_has_a_page_with_problem_mistake_and_what_to_read_next(recipe: Path) -> None:
    assert len(RECIPE_FILES) == len([*COOKBOOK.glob("*.md")]) - 1 == 14  # besides the index
    name = f"{recipe.stem.replace('_', '-')}.md"
    page = (COOKBOOK / name).read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == ["Recipe", "Common mistake", "Read next"]
    assert len(page.partition("\n## ")[0].splitlines()) > 2, "the problem comes first"
    assert f"({name})" in (COOKBOOK / "index.md").read_text()
    if recipe.suffix == ".py":
        assert f'--8<-- "examples/cookbook/{recipe.name}"' in page
        assert "Common mistake" in recipe.read_text().split('"""')[1]
        return
    for cell in json.loads(recipe.read_text())["cells"]:
        text = "".join(cell["source"])
        assert "Common mistake" in text if cell["cell_type"] == "markdown" else text in page
        assert not cell.get("outputs")
