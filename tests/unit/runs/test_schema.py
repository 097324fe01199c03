"""The ``run.json`` of every kind of run matches docs/run.schema.json. J-13."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from jsonschema import Draft202012Validator, ValidationError
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger
from drivetrain.runs._record import FAILED, FINISHED, FORMAT, INTERRUPTED, RUNNING

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "run.schema.json").read_text())


def _parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and its sub-schemas, except for conditions."""
    if isinstance(schema, dict):
        yield schema
        within = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", [])]
        for one in (*within, schema.get("items"), schema.get("additionalProperties")):
            yield from _parts_of(one)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with unknown fields forbidden, so that a new field must be added to it."""
    closed = copy.deepcopy(schema)
    for one in _parts_of(closed):
        if "properties" in one:
            one["additionalProperties"] = False
    return closed


OPEN, CLOSED = Draft202012Validator(SCHEMA), Draft202012Validator(_closed(SCHEMA))


def _checked(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the record in a folder after validating it against the strict schema."""
    with fsspec.open(f"{folder}/run.json", "r") as file:
        record: dict[str, Any] = json.load(file)
    CLOSED.validate(record)
    return record


class Net(TrainModule):
    def __init__(self, shape: tuple[int, ...] = (2, 1), limit: float = math.inf, api_token: str = "hf_x") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(*shape)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.layer(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class At(Callback):
    """Calls a function after the third step."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self._what(trainer)


def _data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2, shuffle=True)


def _fit(root: Any, *callbacks: Callback, **options: Any) -> Fit:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Fit(**{"default_root_dir": root, "callbacks": list(callbacks), "max_epochs": 2, **quiet, **options})


def _ended_by(fit: Fit, error: type[BaseException], **options: Any) -> dict[str, Any]:
    with pytest.raises(error):
        fit.fit(Net(), _data(), **options)
    assert fit.log_dir is not None
    return _checked(fit.log_dir)


def _terminate(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _raise(error: BaseException) -> Any:
    def now(trainer: Any) -> None:
        raise error

    return now


def test_a_fresh_and_a_running_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_LOG_EVERY_N_STEPS", "1")
    meanwhile: list[dict[str, Any]] = []
    look = At(lambda trainer: meanwhile.append(_checked(trainer.log_dir)))
    fit = _fit(tmp_path, look, Checkpoint(tmp_path / "elsewhere"), logger=["csv", CSVLogger(tmp_path / "b", "b")])
    fit.fit(Net(), _data())
    assert fit.log_dir is not None
    [before], record = meanwhile, _checked(fit.log_dir)
    assert (before["status"], before["ended"], before["parts"][0]["to_step"]) == (RUNNING, None, None)
    assert (record["status"], record["why"]) == (FINISHED, "max_epochs=2 is reached")
    assert (record["id"], record["name"], len(record["loggers"])) == (fit.run_id, "drivetrain_logs", 2)
    assert record["hyper_parameters"] == {"shape": {"$tuple": [2, 1]}, "limit": {"$float": "inf"}}
    assert record["settings"]["log_every_n_steps"]["source"] == "environment DRIVETRAIN_LOG_EVERY_N_STEPS"
    assert record["data"] == {"samples": 8, "order": ["shuffled"], "batches": 4, "batch_size": 2}
    [checkpoint] = record["checkpoints"]
    assert checkpoint["path"] == str(tmp_path / "elsewhere" / "epoch=1-step=8")


def test_a_run_that_is_preempted_and_resumed(tmp_path: Path) -> None:
    record = _ended_by(_fit(tmp_path, At(_terminate)), SystemExit)
    assert (record["status"], record["why"]) == (INTERRUPTED, "SIGTERM asked it to save and leave")
    [left] = record["checkpoints"]
    again = _fit(tmp_path)
    again.fit(Net(), _data(), ckpt_path="auto")
    assert again.log_dir is not None
    resumed = _checked(again.log_dir)
    assert (resumed["id"], resumed["status"]) == (record["id"], FINISHED)
    steps = [(part["status"], part["from_step"], part["to_step"]) for part in resumed["parts"]]
    assert steps == [(INTERRUPTED, 0, 3), (FINISHED, 3, 8)]
    assert resumed["parts"][1]["from_checkpoint"] == left["id"]
    assert [(event["kind"], event["step"]) for event in resumed["events"]] == [("began", 0), ("went on", 3)]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("boom\n" * 1000), FAILED), (KeyboardInterrupt(), INTERRUPTED)]
)
def test_a_run_that_an_error_ends(tmp_path: Path, error: BaseException, status: str) -> None:
    record = _ended_by(_fit(tmp_path, At(_raise(error))), type(error))
    assert record["status"] == record["parts"][0]["status"] == status
    assert record["why"].startswith(type(error).__name__)
    assert len(record["why"]) <= 2000


def test_a_test_that_logs(tmp_path: Path) -> None:
    fit = _fit(tmp_path, logger="csv")
    fit.test(Net(), _data(), verbose=False)
    assert fit.log_dir is not None
    record = _checked(fit.log_dir)
    assert (record["stage"], record["status"], record["data"]) == ("test", FINISHED, None)


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    fit = _fit(tmp_path, logger="csv", max_epochs=1)
    fit.fit(Net(), _data())
    assert fit.log_dir is not None
    return _checked(fit.log_dir)


def test_invalid_records_are_refused(record: dict[str, Any]) -> None:
    for key in record:
        with pytest.raises(ValidationError, match=f"'{key}' is a required property"):
            OPEN.validate({name: value for name, value in record.items() if name != key})
    for name in ("process", "data", "parts", "checkpoints", "events", "loggers"):
        entries = record[name] if isinstance(record[name], list) else [record[name]]
        for key in entries[0]:
            lacking: Any = {at: value for at, value in entries[0].items() if at != key}
            with pytest.raises(ValidationError):
                OPEN.validate(record | {name: [lacking] if isinstance(record[name], list) else lacking})
    wrongs: tuple[dict[str, Any], ...] = (
        {"status": "killed"},
        {"status": RUNNING},  # with an end time
        {"ended": None},
        {"format": FORMAT + 1},
        {"started": "2026-11-23 13:32:04"},
        {"parts": []},
        {"world_size": 0},
        {"stage": "fitting"},
    )
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            OPEN.validate(record | wrong)


def test_fields_of_later_versions_are_ignored(record: dict[str, Any]) -> None:
    later = record | {"added": 1, "events": [{**record["events"][0], "added": 2}]}
    OPEN.validate(later)
    with pytest.raises(ValidationError, match="'added' was unexpected"):
        CLOSED.validate(later)


def test_the_schema_is_valid_and_describes_every_field() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format"]["const"] == FORMAT
    assert SCHEMA["$defs"]["status"]["enum"] == [RUNNING, FINISHED, INTERRUPTED, FAILED]
    for one in _parts_of(SCHEMA):
        for name, field in one.get("properties", {}).items():
            assert field.get("description", "").endswith("."), f"{name} has no description"
