"""The recipes of the cookbook run unchanged, and produce the number that their page promises."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.testing import requires_package
from warm_python import hints_in, run_script
from worlds import preload

preload("sklearn.datasets", "sklearn.model_selection")
pytestmark = requires_package("sklearn")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "cookbook"
PAGES = ROOT / "docs" / "cookbook"

WITH_FILES = {"lora", "streaming_data", "run_notebook"}  # checkpoints at every epoch would have the others wait


def run_recipe(script: Path, folder: Path, *arguments: str) -> str:
    """Return what a recipe, or another script, prints."""
    with pytest.MonkeyPatch.context() as patch:
        if script.stem not in WITH_FILES:
            patch.setenv("DRIVETRAIN_ENABLE_CHECKPOINTING", "false")
        code, printed = run_script(script, *arguments, folder=folder)
    assert code == 0, printed[-6000:]
    assert hints_in(printed) == []
    return printed


def numbers(pattern: str, printed: str) -> list[float]:
    """Return the numbers at each ``#`` of the last match of ``pattern``."""
    found = re.findall(pattern.replace("#", r"(\d[\d.,]*(?:e[+-]?\d+)?)"), printed)
    assert found, f"{pattern!r} is not in:\n{printed[-3000:]}"
    return [float(number.replace(",", "")) for number in ([found[-1]] if isinstance(found[-1], str) else found[-1])]


def recipe(name: str, *patterns: str, holds: Callable[..., bool], needs: str = "") -> Any:
    """A recipe, what it prints with numbers at ``#``, and what holds for these numbers."""
    return pytest.param(name, patterns, holds, id=name, marks=[requires_package(each) for each in needs.split()])


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
def test_a_recipe_prints_the_numbers_that_its_page_promises(
    name: str, patterns: tuple[str, ...], holds: Callable[..., bool], tmp_path: Path
) -> None:
    printed = run_recipe(RECIPES / f"{name}.py", tmp_path)
    found = [number for pattern in patterns for number in numbers(pattern, printed)]
    assert holds(*found), f"{found}\n{printed[-3000:]}"
    if name == "lora":
        assert "With another base model: " in printed
        assert "was trained on another base" in printed
    if name == "streaming_data":
        assert printed.splitlines()[-1] == "The weights are the same: True"


# Executes a notebook's cells in the same shell as a kernel.
RUN_NOTEBOOK = """
import json
import sys

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
"""


@requires_package("IPython")
def test_the_notebook_trains_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    script = tmp_path / "run_notebook.py"
    script.write_text(RUN_NOTEBOOK)
    printed = run_recipe(script, tmp_path, str(RECIPES / "notebook.ipynb"))
    ranks, steps, accuracy = numbers("# ranks, # steps, accuracy #%", printed)
    assert (ranks, steps) == (2, 140)
    assert accuracy > 80
    assert printed.splitlines()[-1] == "Losses in the list: 0, in the callback: 140"


RUN_FAILING_CELLS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
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


@requires_package("IPython")
def test_an_error_in_a_notebook_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    script = tmp_path / "failing.py"
    script.write_text(RUN_FAILING_CELLS)
    _, printed = run_script(script, folder=tmp_path)
    _, *cells = printed.split("== cell")
    assert len(cells) == 2
    for shown in cells:
        assert len(re.findall("^ValueError: the data is wrong", shown, re.MULTILINE)) == 1, shown
        assert shown.count('raise ValueError("the " + "data is wrong")') == 1
        assert len(re.findall(r"Where: rank \d", shown)) == 1
        assert not re.search(r"Rank \d failed with", shown)


def test_the_recipe_for_pytest_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, whose fork server has already imported torch.
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", f"--rootdir={RECIPES}"]
    assert pytest.main([*options, str(RECIPES / "test_a_module.py")]) == pytest.ExitCode.OK
    sys.modules.pop("test_a_module")


def test_debugging_nan_finds_the_batch_and_the_operation(tmp_path: Path) -> None:
    printed = run_recipe(RECIPES / "debugging_nan.py", tmp_path)
    lines = [line for line in printed.splitlines() if line.startswith(("The last loss", "A gradient", "Function"))]
    assert re.fullmatch(r"The last loss is [\d.]+, the weights are NaN", lines[0])
    assert "A gradient is nan on rank 0 at batch index 12" in lines[1]
    assert "'SqrtBackward0' returned nan values" in lines[2]
    assert "at batch index 12" in lines[2]
    assert re.fullmatch(r"The last loss is [\d.]+, the weights are finite", lines[3])
    assert len(lines) == 4


RECIPE_FILES = sorted(path for path in RECIPES.iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize("recipe", RECIPE_FILES, ids=lambda path: path.stem)
def test_each_recipe_has_a_page_with_problem_mistake_and_what_to_read_next(recipe: Path) -> None:
    assert len(RECIPE_FILES) == len([*PAGES.glob("*.md")]) - 1 == 14  # besides the index
    name = f"{recipe.stem.replace('_', '-')}.md"
    page = (PAGES / name).read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == ["Recipe", "Common mistake", "Read next"]
    assert len(page.partition("\n## ")[0].splitlines()) > 2, "the problem comes first"
    assert f"({name})" in (PAGES / "index.md").read_text()
    if recipe.suffix == ".py":
        assert f'--8<-- "examples/cookbook/{recipe.name}"' in page
        assert "Common mistake" in recipe.read_text().split('"""')[1]
        return
    for cell in json.loads(recipe.read_text())["cells"]:
        text = "".join(cell["source"])
        assert "Common mistake" in text if cell["cell_type"] == "markdown" else text in page
        assert not cell.get("outputs")
