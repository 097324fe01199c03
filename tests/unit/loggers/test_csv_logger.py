from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import fsspec
import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger


def _rows(logger: CSVLogger) -> list[dict[str, str]]:
    with fsspec.open(f"{logger.log_dir}/metrics.csv", "r", newline="") as stream:
        return list(csv.DictReader(stream))


def test_nothing_is_on_disk_before_the_first_write(tmp_path: Path) -> None:
    #
    logger = CSVLogger(tmp_path)
    assert logger.log_dir == f"{tmp_path}/drivetrain_logs/version_0"
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["metrics.csv"]


def test_a_metric_that_appears_later_becomes_a_column(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 0.1}, step=1)
    logger.log_metrics({"loss": 0.2}, step=2)
    logger.log_metrics({"val, acc": 1 / 3, "loss": math.nan}, step=3)
    logger.log_metrics({"loss": math.inf}, step=4)
    logger.save()
    rows = _rows(logger)
    assert list(rows[0]) == ["step", "loss", "val, acc"]
    assert [row["loss"] for row in rows] == ["0.1", "0.2", "nan", "inf"]
    # Numbers come back as they went in, to the last bit.
    assert float(rows[2]["val, acc"]) == 1 / 3
    assert rows[0]["val, acc"] == ""


def test_one_step_makes_one_row_unless_a_value_would_be_lost(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=5)
    logger.log_metrics({"lr": 0.5}, step=5)
    logger.log_metrics({"loss": 2.0}, step=5)
    logger.save()
    assert [(row["loss"], row["lr"]) for row in _rows(logger)] == [("1.0", "0.5"), ("2.0", "")]


def test_rows_are_held_back_for_as_many_steps_as_told(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=3)
    for step in range(1, 4):
        logger.log_metrics({"loss": float(step)}, step=step)
    assert list(tmp_path.iterdir()) == []
    logger.log_metrics({"loss": 4.0}, step=4)
    assert len(_rows(logger)) == 4
    logger.log_metrics({"loss": 5.0}, step=5)
    assert len(_rows(logger)) == 4
    logger.finalize("success")
    assert len(_rows(logger)) == 5


def test_runs_get_versions_and_a_resumed_run_goes_on_in_its_own(tmp_path: Path) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    # Both were made before either had written: the number is claimed by the write.
    for logger in (first, second):
        logger.log_metrics({"loss": 1.0}, step=1)
        logger.save()
    assert (first.version, second.version) == ("version_0", "version_1")
    resumed = CSVLogger(tmp_path, version=0)
    resumed.log_metrics({"acc": 0.5}, step=2)
    resumed.finalize("success")
    assert resumed.log_dir == first.log_dir
    assert [(row["step"], row["loss"], row["acc"]) for row in _rows(resumed)] == [("1", "1.0", ""), ("2", "", "0.5")]
    named = CSVLogger(tmp_path, name="", version="baseline")
    named.log_metrics({"loss": 1.0}, step=1)
    named.save()
    assert (tmp_path / "baseline" / "metrics.csv").exists()


def test_a_row_torn_by_a_kill_is_dropped_and_the_rest_kept(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    for step in range(3):
        logger.log_metrics({"loss": step + 0.5}, step=step)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    path.write_text(path.read_text() + "3,3.")
    resumed = CSVLogger(tmp_path, version=0)
    resumed.log_metrics({"loss": 3.5}, step=3)
    resumed.save()
    assert [row["loss"] for row in _rows(resumed)] == ["0.5", "1.5", "2.5", "3.5"]


def test_an_fsspec_url_holds_the_same_files() -> None:
    root = "memory://csv-logger-test"
    logger = CSVLogger(root, flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.log_metrics({"acc": 0.5}, step=3)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    again = CSVLogger(root, version=0)
    again.log_metrics({"loss": 4.0}, step=4)
    again.finalize("success")
    assert [(row["step"], row["loss"]) for row in _rows(again)] == [("1", "1.0"), ("2", "2.0"), ("3", ""), ("4", "4.0")]
    assert json.loads(fsspec.open(f"{again.log_dir}/hparams.json").open().read()) == {"lr": 0.1}
    assert CSVLogger(root).version == "version_1"


def test_hyper_parameters_are_json(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="a")
    logger.log_hyperparams({"lr": 0.1, "layers": [1, 2], "path": Path("x")})
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text()) == {
        "lr": 0.1,
        "layers": [1, 2],
        "path": "x",
    }
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    assert list(_rows(logger)[0]) == ["step", "a-loss"]


def test_a_flush_interval_below_one_is_refused(tmp_path: Path) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="flush_logs_every_n_steps=0"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)
