"""CSVLogger when a run resumes from a checkpoint: rows of later steps are removed, and each step appears once. J-13"""

from __future__ import annotations

from pathlib import Path

import pytest
from logged_steps import log_steps, read_table

from drivetrain.errors import DrivetrainError
from drivetrain.loggers import CSVLogger


@pytest.fixture(params=["", "file://", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}{tmp_path}"


def test_rows_and_columns_of_later_steps_are_removed(root: str) -> None:
    # J-13
    first = log_steps(CSVLogger(root, version=0), 10, 20, 30)
    log_steps(first, 30, name="late").save()
    again = CSVLogger(root, version=0)
    again.rewind(20)
    assert read_table(again.log_dir) == ["step,loss", "10,5.0", "20,10.0"]
    log_steps(again, 30)
    log_steps(again, 40, name="late").save()
    assert read_table(again.log_dir) == ["step,loss,late", "10,5.0,", "20,10.0,", "30,15.0,", "40,,20.0"]


@pytest.mark.parametrize("write_first", [False, True])
def test_pending_rows_are_removed(root: str, write_first: bool) -> None:
    # J-13
    logger = log_steps(CSVLogger(root, version=0), 1, 2)
    if write_first:
        logger.save()
    log_steps(logger, 3, 4).rewind(1)
    log_steps(logger, 2).finalize("success")
    assert read_table(logger.log_dir) == ["step,loss", "1,0.5", "2,1.0"]


@pytest.mark.parametrize(("step", "kept"), [(0, ["0,0.0"]), (-1, [])])
def test_a_rewind_to_the_beginning(root: str, step: int, kept: list[str]) -> None:
    # J-13
    log_steps(CSVLogger(root, version=0), 0, 1, 2).save()
    again = CSVLogger(root, version=0)
    again.rewind(step)
    assert read_table(again.log_dir)[1:] == kept
    log_steps(again, 1).save()
    assert read_table(again.log_dir) == ["step,loss", *kept, "1,0.5"]


def test_rows_without_a_step_are_kept_and_those_of_a_spreadsheet_are_read(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    content = b"\xef\xbb\xbfstep,loss\r\n10.0,1\r\nnote,2\r\n,3\r\nnan,4\r\n30.0,5\r\n"
    (tmp_path / "v" / "metrics.csv").write_bytes(content)
    CSVLogger(tmp_path, name="", version="v").rewind(20)
    assert read_table(tmp_path / "v") == ["step,loss", "10.0,1", "note,2", ",3", "nan,4"]


def test_a_rewind_that_fails_leaves_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # J-13
    log_steps(CSVLogger(tmp_path, name="", version="v"), 1, 2, 3).save()
    before = read_table(tmp_path / "v")
    logger = CSVLogger(tmp_path, name="", version="v")

    def refuse(source: str, target: str) -> None:
        raise PermissionError(target)

    with monkeypatch.context() as patches:
        patches.setattr("os.replace", refuse)
        with pytest.raises(DrivetrainError, match=r"metrics\.csv below .* cannot be written: PermissionError"):
            logger.rewind(1)
    assert read_table(tmp_path / "v") == before
    logger.rewind(1)
    assert read_table(tmp_path / "v") == before[:2]
    assert [path.name for path in (tmp_path / "v").iterdir()] == ["metrics.csv"]
