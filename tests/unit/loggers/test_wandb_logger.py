"""WandbLogger with the real wandb, offline, read back from the files that ``wandb sync`` would upload. L-04"""

from __future__ import annotations

import json
import logging
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_steps import log_steps
from services import (
    Drawing,
    assert_no_file_has,
    folder_of,
    offline,
    records_of_kind,
    wandb_config,
    wandb_curve,
    wandb_media,
    wandb_records,
    wandb_rows,
)
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import Histogram, WandbLogger
from drivetrain.testing import requires_package

__all__ = ["offline"]
pytestmark = [requires_package("wandb"), pytest.mark.usefixtures("offline")]


def run_ids(folder: Path) -> list[str]:
    return [run.run_id for part in wandb_records(folder) for run in records_of_kind(part, "run")]


def test_metrics_parameters_and_settings_are_at_wandb(tmp_path: Path) -> None:
    # L-04
    logger = WandbLogger("mine", tmp_path, id="a1", project="digits", offline=True, prefix="a", group="g", tags=["t"])
    assert not list(tmp_path.iterdir())  # building it writes nothing
    params: dict[Any, Any] = {"lr": 0.1, "net": {"width": 3, 0: "cat"}, 5: 1}  # names that are numbers become text
    logger.log_hyperparams(params)
    logger.log_metrics({"loss": 1.5, "epoch": 0}, 3)
    logger.log_metrics({"loss": math.nan}, 6)
    folder = folder_of(logger)
    assert logger.experiment.id == "a1"
    logger.finalize("success")
    assert folder == tmp_path / "digits" / "version_0"
    assert json.loads((folder / "wandb.json").read_text()) == {"run_id": "a1"}
    assert (logger.run_id, logger.url) == ("a1", None)  # S-17: reading them does not continue the run
    (part,) = wandb_records(folder)
    (run,) = records_of_kind(part, "run")
    assert (run.run_id, run.project, run.display_name) == ("a1", "digits", "mine")
    assert (run.run_group, list(run.tags)) == ("g", ["t"])
    assert [one.exit_code for one in records_of_kind(part, "exit")] == [0]
    assert wandb_config(part) == {"lr": 0.1, "net": {"width": 3, "0": "cat"}, "5": 1}
    [rows] = wandb_rows(folder)
    assert [(row["trainer/global_step"], row.get("a-epoch")) for row in rows] == [(3, 0), (6, None)]
    assert rows[0]["a-loss"] == 1.5
    assert math.isnan(rows[1]["a-loss"])
    # The axis of the charts is the optimizer step.
    assert {one.glob_name: one.step_metric for one in records_of_kind(part, "metric")}["*"] == "trainer/global_step"


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("interrupted", 255)])
def test_the_exit_code_of_an_unsuccessful_run(tmp_path: Path, status: str, code: int) -> None:
    logger = log_steps(WandbLogger(save_dir=tmp_path), 1)
    logger.finalize(status)
    (part,) = wandb_records(folder_of(logger))
    assert [one.exit_code for one in records_of_kind(part, "exit")] == [code]


def test_media_of_every_kind(tmp_path: Path) -> None:
    # L-04
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_image("picture", torch.rand(3, 4, 6), 2)
    logger.log_image("grey", torch.rand(4, 6), 2)
    logger.log_figure("figure", Drawing(), 2)
    logger.log_histogram("weights", torch.arange(8.0), 2)
    logger.log_histogram("fine", Histogram.of(torch.arange(1030.0), 1030), 2)  # wandb takes 512 bins
    logger.log_text("text", "a | b", 2)
    logger.log_table("table", {"x": [1, "a"], "y": [0.5, None]}, 2)  # wandb refuses columns of several types
    logger.finalize("success")
    media = wandb_media(folder_of(logger))
    images = {name: (one["width"], one["height"]) for name, one in media.items() if one["_type"] == "image-file"}
    assert images == {"picture": (6, 4), "grey": (6, 4), "figure": (5, 3)}
    assert media["weights"]["_type"] == "histogram"
    assert sum(media["weights"]["values"]) == 8
    assert len(media["weights"]["bins"]) == 65
    assert media["fine"]["values"] == [3] * 343 + [1]
    edges = media["fine"]["bins"]
    assert (len(edges), edges[0], edges[-1]) == (345, 0.0, 1029.0)
    assert (media["table"]["columns"], media["table"]["data"]) == (["x", "y"], [[1, 0.5], ["a", None]])
    assert media["text"]["data"] == [["a | b"]]


def test_a_resumed_run_continues_at_wandb(tmp_path: Path) -> None:
    # L-04: under the same id, with steps that follow the checkpoint's
    first = log_steps(WandbLogger(save_dir=tmp_path, version=0), 2, 4)
    run_id = first.experiment.id
    first.finalize("failed")
    again = WandbLogger(save_dir=tmp_path, version=0)
    again.rewind(4)
    log_steps(again, 6).finalize("success")
    assert again.run_id == run_id
    sent = pickle.loads(pickle.dumps(log_steps(again, 6, name="test_loss")))  # an evaluation, and another process
    assert sent.log_dir == again.log_dir
    again.finalize("success")
    folder = folder_of(again)
    assert wandb_curve(folder, "loss") == [[(2, 1.0), (4, 2.0)], [(6, 3.0)], []]
    assert wandb_curve(folder, "test_loss") == [[], [], [(6, 3.0)]]
    assert run_ids(folder) == [run_id] * 3


def test_another_folder_is_another_run(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    ids = []
    for version in ("version_0", "version_1"):
        logger.adopt(version)
        log_steps(logger, 1).finalize("success")
        ids.append(logger.run_id)
    assert ids[0] != ids[1]
    named = WandbLogger(save_dir=tmp_path, version="mine")
    assert named.experiment.id == named.version == "mine"
    named.finalize("success")


def test_a_run_of_the_users_is_used_and_not_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import wandb

    run = wandb.init(project="theirs", dir=str(tmp_path))
    log_steps(WandbLogger(save_dir=tmp_path / "a", experiment=run), 1).finalize("success")
    found = WandbLogger(save_dir=tmp_path / "b")
    with caplog.at_level(logging.WARNING, "drivetrain"):
        log_steps(found, 2).finalize("success")
    assert "has an active run" in caplog.text
    assert wandb.run is run
    run.finish()
    assert wandb_curve(tmp_path, "loss") == [[(1, 0.5), (2, 1.0)]]


def test_secrets_are_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # J-11: nor by the command line, which wandb keeps
    secret = "sk-very-secret"
    arguments = ["train.py", f"--api_token={secret}", "--lr", "0.1"]
    monkeypatch.setattr(sys, "argv", arguments)
    logger = WandbLogger(save_dir=tmp_path, config={"api_token": secret, "lr": 1})
    logger.log_hyperparams({"api_token": secret, "width": 3})
    logger.finalize("success")
    assert sys.argv is arguments
    (part,) = wandb_records(folder_of(logger))
    logged = [list(one.args) for one in records_of_kind(part, "environment") if one.args]
    assert logged == [["--api_token=...", "--lr", "0.1"]]
    assert_no_file_has(tmp_path, secret)


class Scored(TrainModule):
    """Has the scores 3, 1 and 2 in the first three epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", [3.0, 1.0, 2.0][self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


FIRST = ("epoch=0", 3.0, ["latest", "best"])
SECOND = ("epoch=1", 1.0, ["latest", "best"])
THIRD = ("epoch=2", 2.0, ["latest"])


@pytest.mark.parametrize(
    ("log_model", "top_k", "uploaded"),
    [("all", 1, [FIRST, SECOND]), (True, 1, [SECOND]), (True, -1, [FIRST, SECOND, THIRD]), (False, -1, [])],
)
def test_checkpoints_are_uploaded(tmp_path: Path, log_model: Any, top_k: int, uploaded: list[Any]) -> None:
    # S-18
    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model=log_model)
    data: Any = DataLoader(torch.ones(1, 1))  # type: ignore[arg-type]
    kept = Checkpoint(tmp_path / "kept", filename="{epoch}", monitor="val", save_top_k=top_k)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    Fit(max_epochs=3, accelerator="cpu", logger=logger, callbacks=[kept], **quiet).fit(Scored(), data, data)
    (part,) = wandb_records(folder_of(logger))
    artifacts = records_of_kind(part, "artifact")
    assert {(one.type, one.name) for one in artifacts} <= {("model", f"model-{logger.run_id}")}
    found = [(json.loads(one.metadata), sorted(one.aliases, reverse=True)) for one in artifacts]
    assert [(meta["original_filename"], meta["score"], aliases) for meta, aliases in found] == uploaded
    for one in artifacts:
        assert "manifest.json" in {entry.path for entry in one.manifest.contents}
