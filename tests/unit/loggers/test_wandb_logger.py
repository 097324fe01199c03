"""WandbLogger with the real wandb, offline, read back from the files that ``wandb sync`` would upload. L-04"""

from __future__ import annotations

import json
import logging
import math
import pickle
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import assert_no_file_has, folder_of, log_all_media, log_steps, offline
from torch.utils.data import DataLoader

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import WandbLogger
from drivetrain.testing import requires_package
from one_layer import OneLayer

__all__ = ["offline"]
pytestmark = [requires_package("wandb"), pytest.mark.usefixtures("offline")]

_HEADER_BYTES = 7  # the size of a file's header, and of the header of a record's fragment
_BLOCK_BYTES = 32768
_FULL, _FIRST, _LAST = 1, 2, 4  # types of fragments


def row_of(history: Any) -> dict[str, Any]:
    """Return the values of a history record by name. A value with nested keys (media) is a dict."""
    row: dict[str, Any] = {}
    for item in history.item:
        name, *inner = [item.key] if item.key else item.nested_key
        if inner:
            row.setdefault(name, {})[".".join(inner)] = json.loads(item.value_json)
        else:
            row[name] = json.loads(item.value_json)
    return row


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records, protocol buffers, of one of wandb's local files, in the record format of LevelDB's log."""
    content = path.read_bytes()
    position, record = _HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(content):
        remaining = _BLOCK_BYTES - position % _BLOCK_BYTES
        if remaining < _HEADER_BYTES:  # The rest of the block is too short for a fragment.
            position += remaining
            continue
        checksum, length, record_type = struct.unpack_from("<IHB", content, position)
        position += _HEADER_BYTES
        piece = content[position : position + length]
        assert zlib.crc32(piece, zlib.crc32(bytes([record_type]))) == checksum
        position += length
        record = piece if record_type in (_FULL, _FIRST) else record + piece
        if record_type in (_FULL, _LAST):
            yield record


def wandb_records(folder: Path) -> list[list[Any]]:
    """Return, by part of the run in a folder in order of time, its records by wandb's own schema."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    wandb.teardown()  # writes what wandb's process still has
    parts = sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.parent.stat().st_ctime_ns)
    return [[Record.FromString(content) for content in read_records(path)] for path in parts]


def records_of_kind(part: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in part if record.WhichOneof("record_type") == kind]


def wandb_rows(folder: Path) -> list[list[dict[str, Any]]]:
    """Return, by part of the run in a folder, its rows."""
    return [[row_of(history) for history in records_of_kind(part, "history")] for part in wandb_records(folder)]


def wandb_curve(folder: Path, name: str) -> list[list[tuple[int, Any]]]:
    """Return, by part of the run in a folder, the steps and values of a metric."""
    return [[(row["trainer/global_step"], row[name]) for row in part if name in row] for part in wandb_rows(folder)]


def test_metrics_and_settings_but_no_secrets_are_at_wandb(tmp_path: Path, monkeypatch: Any) -> None:  # J-11, L-04
    secret = "sk-very-secret"
    arguments = ["train.py", f"--api_token={secret}", "--lr", "0.1"]  # wandb keeps the command line
    monkeypatch.setattr(sys, "argv", arguments)
    options: dict[str, Any] = {"project": "digits", "offline": True, "prefix": "a", "config": {"api_token": secret}}
    logger = WandbLogger("mine", tmp_path, id="a1", group="g", tags=["t"], **options)
    assert not list(tmp_path.iterdir())  # building it writes nothing
    params: dict[Any, Any] = {"lr": 0.1, "net": {"width": 3, 0: "cat"}, 5: 1}  # names that are numbers become text
    logger.log_hyperparams({**params, "api_token": secret})
    loss: Any = np.float32(1.5)
    logger.log_metrics({"loss": loss, "epoch": 0}, 3)
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
    updates = [one for record in records_of_kind(part, "config") for one in record.update]
    config = {one.key: json.loads(one.value_json) for one in updates}
    assert config == {"lr": 0.1, "net": {"width": 3, "0": "cat"}, "5": 1}
    [rows] = wandb_rows(folder)
    assert [(row["trainer/global_step"], row.get("a-epoch")) for row in rows] == [(3, 0), (6, None)]
    assert rows[0]["a-loss"] == 1.5
    assert math.isnan(rows[1]["a-loss"])
    # The axis of the charts is the optimizer step.
    assert {one.glob_name: one.step_metric for one in records_of_kind(part, "metric")}["*"] == "trainer/global_step"
    assert sys.argv is arguments
    logged = [list(one.args) for one in records_of_kind(part, "environment") if one.args]
    assert logged == [["--api_token=...", "--lr", "0.1"]]
    assert_no_file_has(tmp_path, secret)


def test_media_of_every_kind(tmp_path: Path) -> None:  # L-04
    logger = WandbLogger(save_dir=tmp_path)
    log_all_media(logger)
    logger.log_image("grey", torch.rand(4, 6), 2)
    logger.log_table("mixed", {"x": [1, "a"], "y": [0.5, None]}, 2)  # wandb refuses columns of several types
    logger.finalize("success")
    [rows] = wandb_rows(folder_of(logger))
    media = {name: value for row in rows for name, value in row.items() if isinstance(value, dict)}
    (files,) = folder_of(logger).glob("wandb/*run-*/files")
    paths = {name: files / value["path"] for name, value in media.items() if value["_type"] == "table-file"}
    tables = {name: json.loads(path.read_text()) for name, path in paths.items()}
    images = {name: (one["width"], one["height"]) for name, one in media.items() if one["_type"] == "image-file"}
    assert images == {"seen/picture": (6, 4), "grey": (6, 4), "figure": (5, 3)}
    assert media["weights"]["_type"] == "histogram"
    assert sum(media["weights"]["values"]) == 8
    assert len(media["weights"]["bins"]) == 65
    assert (tables["table"]["columns"], tables["table"]["data"]) == (["x", "y"], [[1, "a|b"], [2, None]])
    assert tables["mixed"]["data"] == [[1, 0.5], ["a", None]]
    assert tables["text"]["data"] == [["# Hello"]]


def test_a_resumed_run_continues_at_wandb_under_its_id(tmp_path: Path) -> None:  # L-04
    first = log_steps(WandbLogger(save_dir=tmp_path, version=0), 2, 4)
    run_id = first.experiment.id
    first.finalize("failed")
    again = WandbLogger(save_dir=tmp_path, version=0)
    again.rewind(4)
    log_steps(again, 6).finalize("success")
    assert again.run_id == run_id
    sent = pickle.loads(pickle.dumps(log_steps(again, 6, name="test_loss")))  # an evaluation, and another process
    assert sent.log_dir == again.log_dir
    again.finalize("interrupted")
    folder = folder_of(again)
    exits = [one for part in wandb_records(folder) for one in records_of_kind(part, "exit")]
    assert [one.exit_code for one in exits] == [1, 0, 255]
    assert wandb_curve(folder, "loss") == [[(2, 1.0), (4, 2.0)], [(6, 3.0)], []]
    assert wandb_curve(folder, "test_loss") == [[], [], [(6, 3.0)]]
    assert [run.run_id for part in wandb_records(folder) for run in records_of_kind(part, "run")] == [run_id] * 3


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
    named = WandbLogger(save_dir=tmp_path, version="mine")
    assert named.experiment.id == named.version == "mine"
    named.finalize("success")


class Scored(OneLayer):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", [3.0, 1.0, 2.0][self.current_epoch])


FIRST = ("epoch=0", 3.0, ["latest", "best"])
SECOND = ("epoch=1", 1.0, ["latest", "best"])
THIRD = ("epoch=2", 2.0, ["latest"])


@pytest.mark.parametrize(
    ("log_model", "top_k", "uploaded"),
    [("all", 1, [FIRST, SECOND]), (True, 1, [SECOND]), (True, -1, [FIRST, SECOND, THIRD]), (False, -1, [])],
)
def test_checkpoints_are_uploaded(tmp_path: Path, log_model: Any, top_k: int, uploaded: list[Any]) -> None:  # S-18
    logger = WandbLogger(save_dir=tmp_path, offline=True, log_model=log_model)
    data: Any = DataLoader(torch.ones(1, 2))  # type: ignore[arg-type]
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
