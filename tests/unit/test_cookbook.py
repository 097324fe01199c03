"""The recipes of the cookbook run unchanged, and produce the number that their page promises."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.testing import requires_package
from warm_python import hints_in, run_script
from worlds import preload

preload("sklearn.datasets", "sklearn.model_selection")
pytestmark = requires_package("sklearn")

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "cookbook"
PAGES = ROOT / "docs" / "cookbook"

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


WITH_FILES = {"lora", "streaming_data", "run_notebook"}  # checkpoints at every epoch would have the others wait


@pytest.fixture
def run_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that runs a recipe, or another script, and gives what it printed."""

    def run(recipe: str | Path, *arguments: str) -> str:
        script = RECIPES / f"{recipe}.py" if isinstance(recipe, str) else recipe
        if script.stem not in WITH_FILES:
            monkeypatch.setenv("DRIVETRAIN_ENABLE_CHECKPOINTING", "false")
        code, printed = run_script(script, *arguments, folder=tmp_path)
        assert code == 0, printed[-6000:]
        assert hints_in(printed) == []
        return printed

    return run


def numbers(pattern: str, printed: str) -> list[float]:
    """Return the groups of the last match of ``pattern``."""
    found = list(re.finditer(pattern, printed))
    assert found, f"{pattern!r} is not in:\n{printed[-3000:]}"
    return [float(group.replace(",", "")) for group in found[-1].groups()]


def last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def test_transfer_learning_trains_the_head_first(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("transfer_learning")
    [scratch] = numbers(r"from scratch: ([\d.]+)%", printed)
    [at_once] = numbers(r"all at once: ([\d.]+)%", printed)
    [head_first] = numbers(r"head first: ([\d.]+)%", printed)
    assert scratch < at_once < head_first
    assert head_first > 91


def test_gan_draws_the_circle(run_recipe: Callable[..., str]) -> None:
    distance, parts = numbers(r"lie ([\d.]+) from the circle, in (\d) of its 8", run_recipe("gan"))
    assert distance < 0.1
    assert parts == 8


def test_ema_teacher_corrects_random_labels(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("ema_teacher")
    student_alone, _ = numbers(r"Accuracy without teacher: student ([\d.]+)%, average ([\d.]+)%", printed)
    student, teacher = numbers(r"Accuracy with teacher: student ([\d.]+)%, average ([\d.]+)%", printed)
    assert student > student_alone + 2
    assert teacher > student_alone + 2


@requires_package("peft")
def test_lora_saves_the_adapter_and_knows_its_base(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("lora")
    after, before = numbers(r"The loss is ([\d.]+), and was ([\d.]+) at the start", printed)
    adapter, base = numbers(r"The adapter takes ([\d,]+) bytes, the base model ([\d,]+)", printed)
    assert after < before - 0.3
    assert adapter < base / 50
    assert "With another base model: " in printed
    assert "was trained on another base" in printed


def test_several_optimizers_train_everything(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("several_optimizers")
    trained, parameters, *rates = numbers(
        r"(\d+) of (\d+) parameters have trained; the learning rates ended at \[([\d.e-]+), ([\d.e-]+)\]", printed
    )
    assert trained == parameters == 8
    assert rates == pytest.approx([0, 0], abs=1e-9)
    assert numbers(r"Accuracy: ([\d.]+)%", printed)[0] > 92


def test_streaming_data_reads_no_sample_twice(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("streaming_data")
    whole, part, rest = numbers(r"Pieces read: (\d+) in one run; (\d+) before a stop and (\d+) after it", printed)
    assert part + rest == whole
    assert last_line(printed) == "The weights are the same: True"


def test_class_imbalance_weighs_batches_exactly(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("class_imbalance")
    [plain, _] = numbers(r"Without weights: recall ([\d.]+)%, false positive rate ([\d.]+)%", printed)
    [weighted, wrongly] = numbers(r"With weights: recall ([\d.]+)%, false positive rate ([\d.]+)%", printed)
    assert weighted > 2 * plain
    assert wrongly < 5
    assert numbers(r"4 x 16 end within ([\d.e+-]+) of each other", printed)[0] < 1e-5


def test_k_fold_predicts_each_sample_once(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("k_fold")
    predicted, samples, right = numbers(r"(\d+) of (\d+) samples predicted, ([\d.]+)% of them correctly", printed)
    assert predicted == samples == 178
    assert right > 94
    assert numbers(r"Accuracy over 5 folds: ([\d.]+), standard deviation ([\d.]+)", printed)[1] < 0.05


@requires_package("optuna")
def test_optuna_finds_a_learning_rate_and_prunes(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("optuna_sweep")
    accuracy, pruned, trials = numbers(r"Accuracy ([\d.]+)% with .*; (\d+) of (\d+) trials were pruned", printed)
    assert accuracy > 88
    assert 1 <= pruned < trials == 10


@requires_package("ray")
@requires_package("pandas")  # of ray[tune]
def test_ray_tune_finds_a_learning_rate(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("ray_tune_sweep")
    accuracy, _, trials = numbers(r"Accuracy ([\d.]+)% with .*; (\d+) of (\d+) trials ended early", printed)
    assert accuracy > 80
    assert trials == 4


@requires_package("IPython")
def test_the_notebook_trains_on_two_processes(
    run_recipe: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    script = tmp_path / "run_notebook.py"
    script.write_text(RUN_NOTEBOOK)
    printed = run_recipe(script, str(RECIPES / "notebook.ipynb"))
    ranks, steps, accuracy = numbers(r"(\d) ranks, (\d+) steps, accuracy ([\d.]+)%", printed)
    assert (ranks, steps) == (2, 140)
    assert accuracy > 80
    assert last_line(printed) == "Losses in the list: 0, in the callback: 140"


FAILING_CELLS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Fit, TrainModule

class Failing(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        raise ValueError("the " + "data is wrong")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
# next cell
Fit(**options).fit(Failing(), loader)
# next cell
Fit(strategy="ddp", devices=2, **options).fit(Failing(), loader)
"""
RUN_FAILING_CELLS = f"""
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for number, cell in enumerate({FAILING_CELLS!r}.split("# next cell")):
    print("== cell", number, flush=True)
    shell.run_cell(cell)
"""


@requires_package("IPython")
def test_an_error_in_a_notebook_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    script = tmp_path / "failing.py"
    script.write_text(RUN_FAILING_CELLS)
    _, printed = run_script(script, folder=tmp_path)
    for number in (1, 2):
        shown = printed.partition(f"== cell {number}")[2].partition("== cell")[0]
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


@requires_package("tensorboard")
def test_images_are_logged_once_an_epoch(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("logging_images")
    steps = numbers(r"Images at steps \[(\d+), (\d+), (\d+), (\d+), (\d+)\], each 64 x 16", printed)
    assert steps == [28, 56, 84, 112, 140]
    loss, variance = numbers(r"Validation loss: ([\d.]+), the images' variance is ([\d.]+)", printed)
    assert loss < variance / 3


def test_debugging_nan_finds_the_batch_and_the_operation(run_recipe: Callable[..., str]) -> None:
    printed = run_recipe("debugging_nan").splitlines()
    lines = [line for line in printed if line.startswith(("The last loss", "A gradient", "Function"))]
    assert re.fullmatch(r"The last loss is [\d.]+, the weights are NaN", lines[0])
    assert "A gradient is nan on rank 0 at batch index 12" in lines[1]
    assert "'SqrtBackward0' returned nan values" in lines[2]
    assert "at batch index 12" in lines[2]
    assert re.fullmatch(r"The last loss is [\d.]+, the weights are finite", lines[3])
    assert len(lines) == 4


# Pages of the recipes


def _recipes() -> list[Path]:
    return sorted(path for path in RECIPES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_there_is_one_recipe_per_page() -> None:
    pages = {page.stem.replace("-", "_") for page in PAGES.glob("*.md")} - {"index"}
    assert {recipe.stem for recipe in _recipes()} == pages
    assert len(pages) == 14


@pytest.mark.parametrize("recipe", _recipes(), ids=lambda path: path.stem)
def test_a_page_has_problem_recipe_trap_and_what_to_read_next(recipe: Path) -> None:
    page = (PAGES / f"{recipe.stem.replace('_', '-')}.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == ["Recipe", "Common mistake", "Read next"]
    assert len(page.partition("\n## ")[0].splitlines()) > 2, "the problem comes first"
    assert f"({recipe.stem.replace('_', '-')}.md)" in (PAGES / "index.md").read_text()
    if recipe.suffix == ".py":
        assert f'--8<-- "examples/cookbook/{recipe.name}"' in page
        assert "Common mistake" in recipe.read_text().split('"""')[1]
        return
    for cell in json.loads(recipe.read_text())["cells"]:
        text = "".join(cell["source"])
        assert "Common mistake" in text if cell["cell_type"] == "markdown" else text in page
        assert not cell.get("outputs")
