"""WandbLogger with the real wandb, offline, read back from the files that ``wandb sync`` would upload. L-04"""

from __future__ import annotations

import json
import logging
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import Drawing, offline, wandb_curve, wandb_records, wandb_rows
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import Histogram, WandbLogger
from drivetrain.testing import requires_package

__all__ = ["offline"]
pytestmark = [requires_package("wandb"), pytest.mark.usefixtures("offline")]


def folder_of(logger: WandbLogger) -> Path:
    return Path(str(logger.log_dir))


def kinds(part: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in part if record.WhichOneof("record_type") == kind]


def test_what_it_writes(tmp_path: Path) -> None:
    # L-04
    logger = WandbLogger("mine", tmp_path, project="digits", offline=True, prefix="a", group="g", tags=["t"])
    assert not list(tmp_path.iterdir())  # building it touches nothing
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}})
    logger.log_metrics({"loss": 1.5, "epoch": 0}, 3)
    logger.log_metrics({"loss": math.nan}, 6)
    folder = folder_of(logger)
    run_id = logger.experiment.id
    logger.finalize("success")
    assert folder == tmp_path / "digits" / "version_0"
    assert json.loads((folder / "wandb.json").read_text()) == {"run_id": run_id}
    assert (logger.run_id, logger.url) == (run_id, None)  # S-17: reading them does not continue the run
    (part,) = wandb_records(folder)
    (run,) = kinds(part, "run")
    assert (run.run_id, run.project, run.display_name, run.run_group, list(run.tags)) == (
        run_id,
        "digits",
        "mine",
        "g",
        ["t"],
    )
    config = {one.key: json.loads(one.value_json) for update in kinds(part, "config") for one in update.update}
    assert config == {"lr": 0.1, "net": {"width": 3}}
    [rows] = wandb_rows(folder)
    assert [(row["trainer/global_step"], row.get("a-epoch")) for row in rows] == [(3, 0), (6, None)]
    assert rows[0]["a-loss"] == 1.5
    assert math.isnan(rows[1]["a-loss"])
    # The axis of the charts is the optimizer step.
    assert {one.glob_name: one.step_metric for one in kinds(part, "metric")}["*"] == "trainer/global_step"


@pytest.mark.parametrize(("status", "code"), [("success", 0), ("failed", 1), ("interrupted", 255)])
def test_how_the_run_ended(tmp_path: Path, status: str, code: int) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize(status)
    (part,) = wandb_records(folder_of(logger))
    assert [one.exit_code for one in kinds(part, "exit")] == [code]


def test_media(tmp_path: Path) -> None:
    # L-04
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_image("picture", torch.rand(3, 4, 6), 2)
    logger.log_image("grey", torch.rand(4, 6), 2)
    logger.log_figure("figure", Drawing(), 2)
    logger.log_histogram("weights", torch.arange(8.0), 2)
    logger.log_text("said", "a | b", 2)
    logger.log_table("table", {"x": [1, 2], "y": ["a", None]}, 2)
    logger.finalize("success")
    folder = folder_of(logger)
    [rows] = wandb_rows(folder)
    found = {name: value for row in rows for name, value in row.items() if isinstance(value, dict)}
    assert {name: value["_type"] for name, value in found.items()} == {
        "picture": "image-file",
        "grey": "image-file",
        "figure": "image-file",
        "weights": "histogram",
        "said": "table-file",
        "table": "table-file",
    }
    assert (found["picture"]["width"], found["picture"]["height"]) == (6, 4)
    assert sum(found["weights"]["values"]) == 8
    assert len(found["weights"]["bins"]) == 65
    (files,) = folder.glob("wandb/*run-*/files")
    table = json.loads((files / found["table"]["path"]).read_text())
    assert (table["columns"], table["data"]) == (["x", "y"], [[1, "a"], [2, None]])
    assert json.loads((files / found["said"]["path"]).read_text())["data"] == [["a | b"]]


def test_media_that_wandb_does_not_take(tmp_path: Path) -> None:
    # L-04: columns of several types, more than 512 bins, names by numbers
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_table("table", {"x": [1, "a", None, 0.5]}, 2)
    logger.log_histogram("weights", Histogram.of(torch.arange(1030.0), 1030), 2)
    odd: dict[Any, Any] = {"classes": {0: "cat", 1: "dog"}, 5: 1}
    logger.log_hyperparams(odd)
    logger.finalize("success")
    folder = folder_of(logger)
    (files,) = folder.glob("wandb/*run-*/files")
    [rows] = wandb_rows(folder)
    found = {name: value for row in rows for name, value in row.items() if isinstance(value, dict)}
    assert json.loads((files / found["table"]["path"]).read_text())["data"] == [[1], ["a"], [None], [0.5]]
    counts, edges = found["weights"]["values"], found["weights"]["bins"]
    assert counts == [3] * 343 + [1]
    assert (len(edges), edges[0], edges[-1]) == (345, 0.0, 1029.0)
    (part,) = wandb_records(folder)
    config = {one.key: json.loads(one.value_json) for update in kinds(part, "config") for one in update.update}
    assert config == {"classes": {"0": "cat", "1": "dog"}, "5": 1}


def test_a_resumed_run_continues_at_wandb(tmp_path: Path) -> None:
    # L-04: under the same id, with steps that go on from the checkpoint
    first = WandbLogger(save_dir=tmp_path, version=0)
    for step in (2, 4, 6):
        first.log_metrics({"loss": step / 2}, step)
    run_id = first.experiment.id
    first.finalize("failed")
    again = WandbLogger(save_dir=tmp_path, version=0)
    again.rewind(6)
    again.log_metrics({"loss": 4.0}, 8)
    assert again.run_id == run_id
    again.finalize("success")
    assert wandb_curve(folder_of(again), "loss") == [[(2, 1.0), (4, 2.0), (6, 3.0)], [(8, 4.0)]]
    assert _run_ids(folder_of(again)) == [run_id, run_id]


def test_the_same_object_continues_its_run(tmp_path: Path) -> None:
    # L-04
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 2)
    run_id = logger.run_id
    logger.finalize("success")
    logger.rewind(2)
    logger.log_metrics({"loss": 2.0}, 4)
    logger.finalize("success")
    logger.log_metrics({"test_loss": 0.5}, 4)  # an evaluation afterwards
    logger.finalize("success")
    assert wandb_curve(folder_of(logger), "loss") == [[(2, 1.0)], [(4, 2.0)], []]
    assert wandb_curve(folder_of(logger), "test_loss") == [[], [], [(4, 0.5)]]
    assert _run_ids(folder_of(logger)) == [run_id] * 3


def _run_ids(folder: Path) -> list[str]:
    return [run.run_id for part in wandb_records(folder) for run in kinds(part, "run")]


def test_another_folder_is_another_run(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    ids = []
    for version in ("version_0", "version_1"):
        logger.adopt(version)
        logger.log_metrics({"loss": 1.0}, 1)
        ids.append(logger.experiment.id)
        logger.finalize("success")
    assert ids[0] != ids[1]
    named = WandbLogger(save_dir=tmp_path, id="mine")
    assert named.experiment.id == "mine"
    named.finalize("success")
    versioned = WandbLogger(save_dir=tmp_path, version="theirs")
    assert versioned.experiment.id == "theirs"
    assert versioned.version == "theirs"
    versioned.finalize("success")


def test_a_run_of_the_users_is_used_and_not_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import wandb

    run = wandb.init(project="theirs", dir=str(tmp_path))
    given = WandbLogger(save_dir=tmp_path / "a", experiment=run)
    given.log_metrics({"loss": 1.0}, 1)
    given.finalize("success")
    found = WandbLogger(save_dir=tmp_path / "b")
    with caplog.at_level(logging.WARNING, "drivetrain"):
        found.log_metrics({"loss": 2.0}, 2)
    found.finalize("success")
    assert "has an active run" in caplog.text
    assert wandb.run is run
    run.finish()
    assert wandb_curve(tmp_path, "loss") == [[(1, 1.0), (2, 2.0)]]


def test_secrets_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # J-11: nor by the command line, which wandb keeps
    secret = "sk-very-secret"
    arguments = ["train.py", f"--api_token={secret}", "--lr", "0.1"]
    monkeypatch.setattr(sys, "argv", arguments)
    logger = WandbLogger(save_dir=tmp_path, config={"api_token": secret, "lr": 1})
    logger.log_hyperparams({"api_token": secret, "width": 3})
    logger.finalize("success")
    assert sys.argv is arguments
    (part,) = wandb_records(folder_of(logger))
    assert [list(one.args) for one in kinds(part, "environment") if one.args] == [["--api_token=...", "--lr", "0.1"]]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_copy_for_another_process_has_no_connection(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": np.float32(1.0)}, 1)  # type: ignore[dict-item]  # a number of NumPy's is one
    logger.save()
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.log_dir == logger.log_dir
    logger.finalize("success")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"log_model": "every"}, "log_model"),
        ({"anonymous": True}, "anonymous"),
        ({"grup": "x"}, "Did you mean 'group'"),
        ({"add_file_policy": "immutable"}, "add_file_policy"),
        ({"save_dir": "memory://logs"}, "local save_dir"),
    ],
)
def test_what_it_does_not_take(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        WandbLogger(**arguments)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'drivetrain\[wandb\]'"):
        WandbLogger(save_dir=tmp_path)


class Falling(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", [3.0, 1.0, 2.0][self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("log_model", "top_k", "uploaded"),
    [
        ("all", 1, [("epoch=0", 3.0, ["latest", "best"]), ("epoch=1", 1.0, ["latest", "best"])]),
        (True, 1, [("epoch=1", 1.0, ["latest", "best"])]),
        (
            True,
            -1,
            [("epoch=0", 3.0, ["latest", "best"]), ("epoch=1", 1.0, ["latest", "best"]), ("epoch=2", 2.0, ["latest"])],
        ),
        (False, -1, []),
    ],
)
def test_checkpoints_are_uploaded(tmp_path: Path, log_model: Any, top_k: int, uploaded: list[Any]) -> None:
    # S-18
    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model=log_model)
    kept = Checkpoint(tmp_path / "kept", filename="{epoch}", monitor="val", save_top_k=top_k)
    data = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    Fit(
        max_epochs=3,
        accelerator="cpu",
        logger=logger,
        callbacks=[kept],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    ).fit(Falling(), data, data)
    (part,) = wandb_records(folder_of(logger))
    artifacts = kinds(part, "artifact")
    assert {(one.type, one.name) for one in artifacts} <= {("model", f"model-{logger.run_id}")}
    found = [(json.loads(one.metadata), sorted(one.aliases, reverse=True)) for one in artifacts]
    assert [(meta["original_filename"], meta["score"], aliases) for meta, aliases in found] == uploaded
    for one in artifacts:
        assert "manifest.json" in {entry.path for entry in one.manifest.contents}
