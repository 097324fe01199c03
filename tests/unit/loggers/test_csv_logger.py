from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

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
    assert (first.version, second.version) == (0, 1)  # L-10
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
    logger = CSVLogger(root, version=0, flush_logs_every_n_steps=1)
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
    # Two runs could take one number there: the name of another is a time and random letters.
    first, second = CSVLogger(root).version, CSVLogger(root).version
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[a-z]{6}", str(first))
    assert first != second


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


NAMES = ["a,b", 'say "loss"', "two\nlines", "carriage\rreturn", "both\r\n", " spaces ", "Größe", "'", "step"]


@pytest.mark.parametrize("where", ["local", "memory"])
def test_names_and_values_come_back_as_they_went_in(tmp_path: Path, where: str) -> None:
    root = str(tmp_path) if where == "local" else f"memory://{tmp_path.name}"
    values = [math.inf, -math.inf, 5e-324, 1e308, -0.0, 1 / 3, 2**70, True, math.nan]
    for step in range(2):  # the second object reads what the first has written
        logger = CSVLogger(root, version=0)
        logger.log_metrics(dict(zip(NAMES, values, strict=True)), step)
        logger.save()
    logger.log_metrics({"new": 1.0}, 2)  # and the table is written anew
    logger.save()
    rows = _rows(logger)
    assert list(rows[0]) == ["step", *NAMES[:-1], "step.1", "new"]
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    for row in rows[:2]:
        assert [float(row[name]) for name in NAMES[:-1]] == values[:-1]
        assert (row["'"], row["step.1"], row["carriage\rreturn"]) == ("1", "nan", "1e+308")


def test_numbers_of_other_packages_are_written_as_numbers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": np.float64(0.1), "b": np.float32(0.5), "c": torch.tensor(2.0)}, 1)  # type: ignore[dict-item]
    logger.save()
    assert _rows(logger) == [{"step": "1", "a": "0.1", "b": "0.5", "c": "2.0"}]


@pytest.mark.parametrize(
    "tail", ['3,"3.', '3,"3.\n', '3,"a ""quoted"" word\nand a second', '3,"\n\n\n', "3,\xff", "\0\0\0"]
)
def test_a_row_torn_within_quotes_is_dropped_and_the_rest_kept(tmp_path: Path, tail: str) -> None:
    logger = CSVLogger(tmp_path, version=0)
    for step in range(3):
        logger.log_metrics({"two\nlines": step + 0.5}, step=step)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    path.write_bytes(path.read_bytes() + tail.encode("latin-1"))
    resumed = CSVLogger(tmp_path, version=0)
    resumed.log_metrics({"two\nlines": 3.5}, step=3)
    resumed.save()
    assert _rows(resumed) == [{"step": f"{step}", "two\nlines": f"{step}.5"} for step in range(4)]


@pytest.mark.parametrize("length", range(len('step,"two\nlines"\n')))
def test_names_that_are_torn_are_written_anew(tmp_path: Path, length: int) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "metrics.csv").write_text('step,"two\nlines"\n'[:length])
    logger = CSVLogger(tmp_path, name="", version="v")
    logger.log_metrics({"two\nlines": 0.5}, step=1)
    logger.save()
    assert (tmp_path / "v" / "metrics.csv").read_text() == 'step,"two\nlines"\n1,0.5\n'


def test_what_somebody_else_has_written_into_the_table_stays(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    path = tmp_path / "v" / "metrics.csv"
    path.write_bytes(b"step,lr,empty,note\n1,,,caf\xe9\n2,0.5,,\n")
    logger = CSVLogger(tmp_path, name="", version="v")
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.save()
    assert path.read_bytes() == b"step,lr,empty,note,loss\n1,,,caf\xe9,\n2,0.5,,,\n3,,,,0.5\n"


def test_a_table_that_somebody_has_removed_begins_anew_with_its_names(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="v")
    for step in (1, 2):
        logger.log_metrics({"loss": 0.5}, step)
        logger.save()
        if step == 1:
            (tmp_path / "v" / "metrics.csv").unlink()
    assert (tmp_path / "v" / "metrics.csv").read_text() == "step,loss\n2,0.5\n"
