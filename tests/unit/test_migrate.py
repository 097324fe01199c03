"""``python -m drivetrain.migrate`` changes only names, and lists by line what remains to be done."""

from __future__ import annotations

import re
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
from lightning.pytorch.utilities import grad_norm, rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT


class Model(L.LightningModule):  # a LightningModule of "Trainer"s
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("Trainer_loss", loss, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))

    def on_validation_model_eval(self):
        super().on_validation_model_eval()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        x = torch.utils.data.TensorDataset(torch.randn(8, 4))
        return torch.utils.data.DataLoader(x, batch_size=4)


@rank_zero_only
def count(steps):
    steps_seen.append(steps)


steps_seen = []
kept = ModelCheckpoint(monitor="Trainer_loss")
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, callbacks=[kept, EarlyStopping("Trainer_loss")], logger=CSVLogger(root),
    default_root_dir=root, enable_progress_bar=False, enable_model_summary=False,
)
model, other = Model(), Model()
trainer.fit(model=model, datamodule=Data())
count(trainer.global_step)
rank_zero_info("trained")
rank_zero_warn("be careful")
state = torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]
other.load_state_dict(state)
"""


def test_a_migrated_script_runs(tmp_path: Path) -> None:  # L-10, Q-11
    migrated = migrate(SCRIPT)
    assert migrated.remaining == []
    assert "lightning" not in migrated.source
    assert 'class Model(L.TrainModule):  # a LightningModule of "Trainer"s' in migrated.source
    assert 'self.log("Trainer_loss", loss' in migrated.source
    names: dict[str, Any] = {"root": str(tmp_path), "__name__": "migrated"}
    with pytest.warns(UserWarning, match="be careful"):
        exec(compile(migrated.source, "migrated.py", "exec"), names)
    assert names["steps_seen"] == [4]
    assert names["kept"].best_model_path
    assert names["other"].net.weight.equal(names["model"].net.weight)
    assert "grad_2.0_norm/weight" in names["trainer"].callback_metrics


@pytest.mark.parametrize(
    "text",  # {what is there|what replaces it}
    [
        "import {pytorch_lightning|drivetrain} as pl\npl.{Trainer|Fit}()\n",
        "import {lightning.pytorch|drivetrain}\nx = {lightning.pytorch.Trainer|drivetrain.Fit}()\n",
        "import {pytorch_lightning, os|drivetrain\nimport os}\n",
        "{from lightning import pytorch|import drivetrain} as pl\npl.{LightningModule|TrainModule}\n",
        "from {lightning.pytorch|drivetrain} import {Trainer|Fit} as T, {LightningModule|TrainModule}\n",
        "if x:\n    from {lightning.pytorch.strategies|drivetrain_strategies} import DDPStrategy, FSDPStrategy\n",
        "import {lightning.pytorch|drivetrain} as pl\ns = 'é'; c = pl.callbacks.{ModelCheckpoint|Checkpoint}()\n",
        "from mine import Trainer\nTrainer(gpus=1)\n",
        # the lines of an import are kept
        "import os; import {lightning|drivetrain} as L; L.{Trainer|Fit}()\n",
        "try: import {lightning|drivetrain} as L\nexcept E: L = 0\n",
        "import {lightning|drivetrain} as L  # noqa\n",
        "if x:\n\t{from lightning import (  # a\n\t\tTrainer,  # b\n\t)|# a\n\t# b\n\tfrom drivetrain import Fit}  # c",
        "import {lightning|drivetrain} as L",
        # line breaks as Python defines them
        "import {lightning|drivetrain} as L\r\nL.{Trainer|Fit}()\r\n",
        "import os\n\x0c\nimport {lightning|drivetrain} as L\nL.{Trainer|Fit}()\n",
        "s = '\u2028\x1c'\nimport {lightning|drivetrain} as L\nL.{Trainer|Fit}()\n",
        # another object with the old name, or the new one
        "from .lightning import Model, Trainer\nTrainer()\n",
        "from {lightning|drivetrain} import {|Fit as }Trainer\ndef f(x, Trainer=Trainer): return x\nf(1, Trainer=2)",
        "from {lightning|drivetrain} import {|DataModule as }LightningDataModule\n"
        "class DataModule(LightningDataModule): ...\nDataModule\n",
        "from {lightning|drivetrain} import {|Fit as }Trainer\nfrom mine import Fit\nFit(Trainer)\n",
        "from {lightning|drivetrain} import {|Fit as }Trainer\n__all__ = ['Trainer']\n",
        # longer paths to a class
        "import {lightning|drivetrain}\n{lightning.pytorch.Trainer|drivetrain.Fit}()\n",
        "import {lightning|drivetrain} as L\nL{.pytorch|}.callbacks.Timer()\n",
        "import {lightning.pytorch|drivetrain}.callbacks as c\nc.{ModelCheckpoint|Checkpoint}()\n",
        "from {lightning.pytorch|drivetrain} import callbacks as c\nc.{ModelCheckpoint|Checkpoint}()\n",
        "import {pytorch_lightning|drivetrain}.loggers\n{pytorch_lightning|drivetrain}.loggers.CSVLogger\n",
        # strings that contain Python code
        "from {lightning|drivetrain} import {Trainer|Fit}\nimport {lightning|drivetrain} as L\n"
        "def f(a: '{Trainer|Fit} | None') -> \"list[L.{Trainer|Fit}]\": return f'{{Trainer|Fit}} Trainer'\n",
        # a checkpoint that is read
        "import torch\r\nimport {lightning|drivetrain.checkpoint\r\nimport drivetrain} as L\r\n"
        'a = {torch.load(|drivetrain.checkpoint.evaluated_weights(}c.best_model_path{)["state_dict"]|)}\r\n',
        "import torch\n{|import drivetrain.checkpoint\n}from {lightning|drivetrain} import {Trainer|Fit}\n"
        "a = {torch.load(|drivetrain.checkpoint.evaluated_weights(}{Trainer|Fit}().c.best_model_path"
        '{, map_location="cpu")["state_dict"]|)}; b = 1\nc = 2\n',
    ],
)
def test_names_of_lightning_are_changed_and_nothing_else(text: str) -> None:  # L-10
    before, after = (re.sub(r"\{([^{}|]*)\|([^{}]*)\}", rf"\{group}", text) for group in (1, 2))
    migrated = migrate(before)
    assert (migrated.source, migrated.remaining) == (after, [])


@pytest.mark.parametrize(
    ("source", "line", "note"),
    [
        ("from lightning import Trainer as T\nT(gpus=2)\n", 2, "gpus="),
        ("from lightning.pytorch import *\n", 1, "import the names that are used"),
        ("from pytorch_lightning import Trainer\nTrainer.from_argparse_args(a)\n", 2, "does not exist in drivetrain"),
        ("import lightning as L\nf = lambda L: L.Trainer\n", 2, "another object"),
        ("import lightning as L\nx = [L.Trainer for L in y]\n", 2, "another object"),
        ("x.patch('lightning.pytorch.Trainer')\n", 1, "in a string"),
        ("import lightning.pytorch.utilities as u\nu.grad_norm(module, 2)\n", 1, "import the names that you use"),
        ("import lightning as L\nL.pytorch.utilities.grad_norm(m, 2)", 2, "write `from drivetrain import grad_norm`"),
    ],
)
def test_names_without_a_counterpart_are_listed(source: str, line: int, note: str) -> None:
    assert [at for at, text in migrate(source).remaining if note in text] == [line]


def test_files_are_shown_or_written_and_keep_their_bytes_and_mode(tmp_path: Path, capsys: Any) -> None:  # L-10
    script, link, latin, other = (tmp_path / name for name in ("a.py", "link.py", "latin.py", "other.py"))
    script.write_bytes(b"\xef\xbb\xbfimport lightning as L\r\nL.Trainer()")
    script.chmod(0o750)
    link.symlink_to(script)
    latin.write_bytes(b"# coding: latin-1\nimport lightning as L  # \xe9\n")
    other.write_text("import os\n")
    assert main([str(script), str(other)]) == 0
    assert "+L.Fit()\n\\ No newline at end of file\n" in capsys.readouterr().out
    assert b"Trainer" in script.read_bytes()  # it was only displayed
    for _ in range(2):  # the second time changes nothing
        assert main(["--write", str(link), str(latin), str(other)]) == 0
        assert link.is_symlink()
        assert script.read_bytes() == b"\xef\xbb\xbfimport drivetrain as L\r\nL.Fit()"
        assert script.stat().st_mode & 0o777 == 0o750
        assert latin.read_bytes() == b"# coding: latin-1\nimport drivetrain as L  # \xe9\n"
        assert other.read_text() == "import os\n"
        assert sorted(one.name for one in tmp_path.iterdir()) == ["a.py", "latin.py", "link.py", "other.py"]
    assert "lightning" not in sys.modules


def test_what_cannot_be_migrated_goes_to_stderr_and_into_the_exit_code(tmp_path: Path, capsys: Any) -> None:
    script, notebook, broken = (tmp_path / name for name in ("train.py", "a.ipynb", "broken.py"))
    script.write_text("import torch\nimport lightning as L\nx = torch.load(L.Trainer().c.last_model_path)\n")
    notebook.write_text('{"cells": []}')
    broken.write_text("def\n")
    for path, notes in (
        (script, ["train.py:3: torch.load(L.Trainer().c.last_model_path)", "drivetrain.checkpoint.load(path)"]),
        (notebook, ["notebook"]),
        (broken, ["broken.py"]),
    ):
        assert main(["--write", str(path)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert all(note in printed.err for note in notes)


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # L-10
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
    def training_step(self, batch):
        self.manual_backward(loss, retain_graph=True)
        return self.trainer.fit_loop.total_batch_idx

trainer = Trainer(gpus=2, plugins=[])
trainer.strategy.model
pl.strategies.DDPStrategy
"""
    left = migrate(source).remaining
    assert [line for line, _ in left] == [2, 7, 8, 10, 10, 11, 12]
    notes = dict(left)
    assert "ModelPruning of lightning.pytorch.callbacks has no known counterpart" in notes[2]
    assert "trainer.current_epoch" in notes[8]
    assert "read trainer.model" in notes[11]
    assert "write `from drivetrain_strategies import DDPStrategy`" in notes[12]
    assert {text.partition("=")[0] for line, text in left if line == 10} == {"gpus", "plugins"}


CONFIGURATION = """\
# for lightning.pytorch.Trainer
trainer:
  _target_: lightning.pytorch.Trainer  # of lightning.pytorch
  callbacks:
    - _target_: "lightning.pytorch.callbacks.ModelCheckpoint"
      monitor: val
    - class_path: pytorch_lightning.callbacks.EarlyStopping
    - _target_: lightning.pytorch.callbacks.Unheard
data:
  base: lightning.pytorch.LightningDataModule
  folder: data/lightning.pytorch
"""


def test_classes_in_yaml_files_are_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # S-16
    path = tmp_path / "train.yaml"
    path.write_text(CONFIGURATION)
    assert main(["--write", str(path)]) == 1
    expected = CONFIGURATION.replace("_target_: lightning.pytorch.Trainer", "_target_: drivetrain.Fit")
    expected = expected.replace("lightning.pytorch.callbacks.ModelCheckpoint", "drivetrain.callbacks.Checkpoint")
    expected = expected.replace("pytorch_lightning.callbacks.EarlyStopping", "drivetrain.callbacks.EarlyStopping")
    assert path.read_text() == expected
    notes = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{path}:").partition(": ")[0] for line in notes] == ["8", "10"]
    assert "Unheard has no known counterpart" in notes[0]
    assert "is a Lightning name in a value" in notes[1]
    path.write_text("model:\n  class_path: lightning.pytorch.demos.boring_classes.BoringModel\n")
    assert main([str(path)]) == 1


def test_torch_is_not_imported() -> None:  # S-16
    use = f"from drivetrain.migrate import migrate; migrate({SCRIPT!r})"
    code = f"import sys; {use}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
