"""``python -m drivetrain.migrate`` changes only names, and lists by line what remains to be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain.migrate import main, migrate

SCRIPT = """\
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only


class Model(L.LightningModule):  # a LightningModule of "Trainer"s
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("Trainer_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        x = torch.utils.data.TensorDataset(torch.randn(8, 4))
        return torch.utils.data.DataLoader(x, batch_size=4)


@rank_zero_only
def tell(text):
    told.append(text)


told = []
kept = ModelCheckpoint(monitor="Trainer_loss")
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, callbacks=[kept, EarlyStopping("Trainer_loss")], logger=CSVLogger(root),
    default_root_dir=root, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model=Model(), datamodule=Data())
tell(trainer.global_step)
"""


def test_a_migrated_script_runs(tmp_path: Path) -> None:
    # L-10
    migrated = migrate(SCRIPT)
    assert migrated.remaining == []
    assert "lightning" not in migrated.source
    assert 'class Model(L.TrainModule):  # a LightningModule of "Trainer"s' in migrated.source
    assert 'self.log("Trainer_loss", loss' in migrated.source
    names: dict[str, Any] = {"root": str(tmp_path), "__name__": "migrated"}
    exec(compile(migrated.source, "migrated.py", "exec"), names)
    assert names["told"] == [4]
    assert names["kept"].best_model_path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import pytorch_lightning as pl\npl.Trainer()\n", "import drivetrain as pl\npl.Fit()\n"),
        ("import lightning.pytorch\nx = lightning.pytorch.Trainer()\n", "import drivetrain\nx = drivetrain.Fit()\n"),
        ("import pytorch_lightning, os\n", "import drivetrain\nimport os\n"),
        ("from lightning import pytorch as pl\npl.LightningModule\n", "import drivetrain as pl\npl.TrainModule\n"),
        (
            "from lightning.pytorch import Trainer as T, LightningModule\nT(), LightningModule\n",
            "from drivetrain import Fit as T, TrainModule\nT(), TrainModule\n",
        ),
        (
            "if x:\n    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy\n",
            "if x:\n    from drivetrain_strategies import DDPStrategy, FSDPStrategy\n",
        ),
        (
            "import lightning.pytorch as pl\ns = 'é'; c = pl.callbacks.ModelCheckpoint()\n",
            "import drivetrain as pl\ns = 'é'; c = pl.callbacks.Checkpoint()\n",
        ),
        ("from mine import Trainer\nTrainer(gpus=1)\n", "from mine import Trainer\nTrainer(gpus=1)\n"),
    ],
)
def test_only_lightnings_names_are_changed(before: str, after: str) -> None:
    migrated = migrate(before)
    assert (migrated.source, migrated.remaining) == (after, [])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # the lines of an import are kept
        ("import os; import lightning as L; L.Trainer()\n", "import os; import drivetrain as L; L.Fit()\n"),
        ("try: import lightning as L\nexcept E: L = 0\n", "try: import drivetrain as L\nexcept E: L = 0\n"),
        ("import lightning as L  # noqa\n", "import drivetrain as L  # noqa\n"),
        (
            "if x:\n\tfrom lightning import (  # a\n\t\tTrainer,  # b\n\t)  # c\n",
            "if x:\n\t# a\n\t# b\n\tfrom drivetrain import Fit  # c\n",
        ),
        ("import lightning as L", "import drivetrain as L"),
        # line breaks as Python defines them
        ("import lightning as L\r\nL.Trainer()\r\n", "import drivetrain as L\r\nL.Fit()\r\n"),
        ("import os\n\x0c\nimport lightning as L\nL.Trainer()\n", "import os\n\x0c\nimport drivetrain as L\nL.Fit()\n"),
        (
            "s = '\u2028\x1c'\nimport lightning as L\nL.Trainer()\n",
            "s = '\u2028\x1c'\nimport drivetrain as L\nL.Fit()\n",
        ),
        # another object with the old name, or the new one
        ("from .lightning import Model, Trainer\nTrainer()\n",) * 2,
        (
            "from lightning import Trainer\ndef f(x, Trainer=Trainer):\n    return Trainer\nf(1, Trainer=2)\n",
            "from drivetrain import Fit as Trainer\ndef f(x, Trainer=Trainer):\n    return Trainer\nf(1, Trainer=2)\n",
        ),
        (
            "from lightning import LightningDataModule\nclass DataModule(LightningDataModule): ...\nDataModule\n",
            "from drivetrain import DataModule as LightningDataModule\n"
            "class DataModule(LightningDataModule): ...\nDataModule\n",
        ),
        (
            "from lightning import Trainer\nfrom mine import Fit\nFit(Trainer)\n",
            "from drivetrain import Fit as Trainer\nfrom mine import Fit\nFit(Trainer)\n",
        ),
        (
            "from lightning import Trainer\n__all__ = ['Trainer']\n",
            "from drivetrain import Fit as Trainer\n__all__ = ['Trainer']\n",
        ),
        ("import lightning as L\nf = lambda L: L.Trainer\n", "import drivetrain as L\nf = lambda L: L.Trainer\n"),
        # longer paths to a class
        ("import lightning\nlightning.pytorch.Trainer()\n", "import drivetrain\ndrivetrain.Fit()\n"),
        ("import lightning as L\nL.pytorch.callbacks.Timer()\n", "import drivetrain as L\nL.callbacks.Timer()\n"),
        (
            "import lightning.pytorch.callbacks as c\nc.ModelCheckpoint()\n",
            "import drivetrain.callbacks as c\nc.Checkpoint()\n",
        ),
        (
            "from lightning.pytorch import callbacks as c\nc.ModelCheckpoint()\n",
            "from drivetrain import callbacks as c\nc.Checkpoint()\n",
        ),
        (
            "import pytorch_lightning.loggers\npytorch_lightning.loggers.CSVLogger\n",
            "import drivetrain.loggers\ndrivetrain.loggers.CSVLogger\n",
        ),
        # strings that contain Python code
        (
            "from lightning import Trainer\nimport lightning as L\n"
            "def f(a: 'Trainer | None') -> \"list[L.Trainer]\": return f'{Trainer} Trainer'\n",
            "from drivetrain import Fit\nimport drivetrain as L\n"
            "def f(a: 'Fit | None') -> \"list[L.Fit]\": return f'{Fit} Trainer'\n",
        ),
    ],
)
def test_nothing_else_is_changed(before: str, after: str) -> None:
    # L-10
    migrated = migrate(before)
    assert (migrated.source, migrated.remaining) == (after, [])


@pytest.mark.parametrize(
    ("source", "line", "what"),
    [
        ("from lightning import Trainer as T\nT(gpus=2)\n", 2, "gpus="),
        ("from lightning.pytorch import *\n", 1, "import the names that are used"),
        ("from pytorch_lightning import Trainer\nTrainer.from_argparse_args(a)\n", 2, "does not exist in drivetrain"),
        ("x.patch('lightning.pytorch.Trainer')\n", 1, "in a string"),
    ],
)
def test_indirect_imports_are_listed(source: str, line: int, what: str) -> None:
    [(at, text)] = migrate(source).remaining
    assert at == line
    assert what in text


def test_a_logarithm_is_not_a_log_call() -> None:
    assert migrate("from lightning import Trainer\nnp.log(1, 2, 3)\nlogging.log(1, 'a', 2)\n").remaining == []


def test_a_file_keeps_its_bytes_and_its_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # L-10
    script, link, latin, notebook = (tmp_path / name for name in ("a.py", "link.py", "latin.py", "a.ipynb"))
    script.write_bytes(b"\xef\xbb\xbfimport lightning as L\r\nL.Trainer()")
    script.chmod(0o750)
    link.symlink_to(script)
    latin.write_bytes(b"# coding: latin-1\nimport lightning as L  # \xe9\n")
    notebook.write_text('{"cells": []}')
    assert main([str(script)]) == 0
    assert "+L.Fit()\n\\ No newline at end of file\n" in capsys.readouterr().out
    assert main(["--write", str(link), str(latin), str(notebook)]) == 1
    assert "notebook" in capsys.readouterr().err
    assert link.is_symlink()
    assert script.read_bytes() == b"\xef\xbb\xbfimport drivetrain as L\r\nL.Fit()"
    assert script.stat().st_mode & 0o777 == 0o750
    assert latin.read_bytes() == b"# coding: latin-1\nimport drivetrain as L  # \xe9\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.ipynb", "a.py", "latin.py", "link.py"]


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-10: the disk is full
    script = tmp_path / "a.py"
    script.write_text(SCRIPT)

    def full(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["--write", str(script)]) == 1
    assert script.read_text() == SCRIPT
    assert list(tmp_path.iterdir()) == [script]


def test_remaining_work_is_listed_by_line() -> None:
    source = """\
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
import lightning.pytorch as pl

class Model(LightningModule):
    def training_step(self, dataloader_iter):
        self.log("loss", 1.0, True)
        self.manual_backward(loss, retain_graph=True)
        return self.trainer.fit_loop.total_batch_idx

    def training_epoch_end(self, outputs): ...

trainer = Trainer(gpus=2, plugins=[])
trainer.strategy.model
pl.strategies.DDPStrategy
"""
    left = migrate(source).remaining
    assert [line for line, _ in left] == [2, 6, 7, 8, 9, 11, 13, 13, 14, 15]
    told = dict(left)
    assert "ModelPruning of lightning.pytorch.callbacks has no known counterpart" in told[2]
    assert "instead of dataloader_iter" in told[6]
    assert "prog_bar=True" in told[7]
    assert "trainer.current_epoch" in told[9]
    assert "read trainer.model" in told[14]
    assert "no counterpart in drivetrain.strategies" in told[15]
    assert {text.partition("=")[0] for line, text in left if line == 13} == {"gpus", "plugins"}


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, other, broken = tmp_path / "train.py", tmp_path / "other.py", tmp_path / "broken.py"
    script.write_text(SCRIPT)
    other.write_text("import os\n")
    broken.write_text("def\n")
    assert main([str(script), str(other)]) == 0
    assert "+class Model(L.TrainModule)" in capsys.readouterr().out
    assert script.read_text() == SCRIPT  # it was only displayed
    assert main(["--write", str(script), str(other), str(broken)]) == 1
    assert "broken.py" in capsys.readouterr().err
    assert script.read_text() == migrate(SCRIPT).source
    assert other.read_text() == "import os\n"
    assert migrate(script.read_text()).source == script.read_text()  # a second run changes nothing
    assert "lightning" not in sys.modules


IDIOMS = """\
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm, rank_zero_info
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        return self.net(batch).pow(2).mean()

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))

    def on_validation_model_eval(self):
        super().on_validation_model_eval()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = Trainer(
    max_epochs=1, accelerator="cpu", logger=False, default_root_dir=root, enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
rank_zero_info("trained")
rank_zero_warn("be careful")
state = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
other = Model()
other.load_state_dict(state)
"""


def test_idioms_become_what_runs_here(tmp_path: Path) -> None:
    migrated = migrate(IDIOMS)
    assert migrated.remaining == []
    bound: dict[str, Any] = {"root": str(tmp_path), "__name__": "train"}
    with pytest.warns(UserWarning, match="be careful"):
        exec(compile(migrated.source, "train.py", "exec"), bound)
    assert bound["other"].net.weight.equal(bound["model"].net.weight)
    assert "grad_2.0_norm/weight" in bound["trainer"].callback_metrics


def test_what_remains_goes_to_stderr_and_into_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(IDIOMS + "loaded = torch.load(trainer.checkpoint_callback.last_model_path)\n")
    assert main(["--write", str(script)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "train.py:37: torch.load(trainer.checkpoint_callback.last_model_path)" in printed.err
    assert "drivetrain.checkpoint.load(path)" in printed.err


def test_a_read_of_a_checkpoint_keeps_the_edits_within_it() -> None:
    source = (
        "import torch\nfrom lightning import Trainer\n"
        'a = torch.load(Trainer().checkpoint_callback.best_model_path, map_location="cpu")["state_dict"]; b = 1\n'
        "c = 2\n"
    )
    migrated = migrate(source)
    assert migrated.remaining == []
    assert migrated.source.endswith(
        "a = drivetrain.checkpoint.evaluated_weights(Fit().checkpoint_callback.best_model_path); b = 1\nc = 2\n"
    )


def test_an_added_import_ends_its_line_as_the_file_does() -> None:
    migrated = migrate('import torch\r\nimport lightning as L\r\na = torch.load(c.best_model_path)["state_dict"]\r\n')
    assert "import drivetrain.checkpoint\r\nimport drivetrain as L\r\n" in migrated.source


def test_modules_of_lightning_without_a_counterpart_are_listed() -> None:
    migrated = migrate("import lightning.pytorch.utilities as utilities\nutilities.grad_norm(module, 2)\n")
    assert [line for line, _ in migrated.remaining] == [1]
    migrated = migrate("import lightning as L\nL.pytorch.utilities.grad_norm(module, 2)\n")
    assert any("write `from drivetrain import grad_norm`" in text for _, text in migrated.remaining)


CONFIGURATION = """\
# for lightning.pytorch.Trainer
trainer:
  _target_: lightning.pytorch.Trainer  # of lightning.pytorch
  gpus: 2
  callbacks:
    - _target_: "lightning.pytorch.callbacks.ModelCheckpoint"
      monitor: val
    - class_path: pytorch_lightning.callbacks.EarlyStopping
    - _target_: lightning.pytorch.callbacks.Unheard
data:
  base: lightning.pytorch.LightningDataModule
  folder: data/lightning.pytorch
"""


def test_classes_in_yaml_files_are_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # S-16
    path = tmp_path / "train.yaml"
    path.write_text(CONFIGURATION)
    assert main(["--write", str(path)]) == 1
    expected = CONFIGURATION.replace("_target_: lightning.pytorch.Trainer", "_target_: drivetrain.Fit")
    expected = expected.replace("lightning.pytorch.callbacks.ModelCheckpoint", "drivetrain.callbacks.Checkpoint")
    expected = expected.replace("pytorch_lightning.callbacks.EarlyStopping", "drivetrain.callbacks.EarlyStopping")
    assert path.read_text() == expected
    told = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{path}:").partition(": ")[0] for line in told] == ["4", "9", "11"]
    assert "gpus: use devices=" in told[0]
    assert "Unheard has no known counterpart" in told[1]
    assert "is a Lightning name in a value" in told[2]
    path.write_text("model:\n  class_path: lightning.pytorch.demos.boring_classes.BoringModel\n")
    assert main([str(path)]) == 1


def test_torch_is_not_imported() -> None:
    # S-16
    script = (
        f"import sys; from drivetrain.migrate import migrate; migrate({SCRIPT!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
