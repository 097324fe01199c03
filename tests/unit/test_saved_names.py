"""What a run writes uses the words of the code or of the documentation, in checkpoints and in run.json (K-08)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping, LossSpikeGuard, Timer, WeightAveraging
from drivetrain.checkpoint import load

ROOT = Path(__file__).parents[2]
OF_OTHERS = {"versions", "files", "hyper_parameters", "optimizers"}
"""The keys whose values have keys that are not ours: packages, files and parameters."""


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def words_of_the_code_and_the_docs() -> set[str]:
    found: set[str] = set()
    for package in (ROOT / "framework", ROOT / "strategies"):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                found.update(str(getattr(node, field, "")).lstrip("_") for field in ("attr", "id", "arg", "name"))
    for page in (ROOT / "docs").glob("*.md"):
        found.update(re.findall(r"\w+", page.read_text()))
    return found


def keys(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield str(key)
        if key not in OF_OTHERS:
            yield from keys(inner)
    for inner in value if isinstance(value, list | tuple) else ():
        yield from keys(inner)


def test_saved_keys_are_names_of_the_code(tmp_path: Path) -> None:  # K-08
    monitors = Checkpoint(monitor="val_loss"), EarlyStopping("val_loss")
    callbacks = [*monitors, Timer(), WeightAveraging(), LossSpikeGuard()]
    data: Any = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)  # type: ignore[arg-type]
    Fit(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, callbacks=callbacks).fit(Net(), data, data)
    (folder,) = tmp_path.glob("drivetrain_logs/version_0/checkpoints/epoch=*")
    record = json.loads((tmp_path / "drivetrain_logs/version_0/run.json").read_text())
    manifest = json.JSONDecoder().raw_decode((folder / "manifest.json").read_text())[0]
    documents = [json.loads(path.read_text()) for path in folder.glob("*.json") if path.name != "manifest.json"]
    saved = {key for document in (record, manifest, load(folder).progress, *documents) for key in keys(document)}
    assert len(saved) > 100
    optimizer = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    of_torch = {"exp_avg", "exp_avg_sq", *optimizer.param_groups[0], *plateau.state_dict()}
    ours = {key for key in saved - of_torch if re.fullmatch(r"[a-z]\w+", key)}
    assert sorted(ours - words_of_the_code_and_the_docs()) == []
