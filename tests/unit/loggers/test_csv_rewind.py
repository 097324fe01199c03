"""CSVLogger when a run resumes from a checkpoint: rows of later steps are removed, and each step appears once. J-13"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from drivetrain import Logger
from drivetrain.errors import DrivetrainError
from drivetrain.loggers import CSVLogger


def table(folder: str | Path) -> list[str]:
    with fsspec.open(f"{folder}/metrics.csv", "r", newline="") as stream:
        return str(stream.read()).splitlines()


def logged(logger: Logger, *steps: int, name: str = "loss") -> Logger:
    for step in steps:
        logger.log_metrics({name: step / 2}, step)
    return logger


def test_a_logger_that_cannot_rewind_goes_on_as_it_is() -> None:
    # J-13
    class Kept(Logger):
        name = "kept"
        version = "version_0"

        def __init__(self) -> None:
            self.steps: list[int] = []

        def log_metrics(self, metrics: Any, step: int) -> None:
            self.steps.append(step)

    logger = Kept()
    logged(logger, 1, 2).rewind(1)
    assert logger.steps == [1, 2]


@pytest.fixture(params=["local", "file://", "memory://"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"local": f"{tmp_path}", "file://": f"file://{tmp_path}", "memory://": f"memory://{tmp_path.name}"}[
        request.param
    ]


class TestCSV:
    """J-13"""

    def test_rows_of_later_steps_go_and_those_of_the_run_come(self, root: str) -> None:
        logged(CSVLogger(root, version=0), *range(10, 31, 10)).save()
        again = CSVLogger(root, version=0)
        again.rewind(20)
        assert table(again.log_dir) == ["step,loss", "10,5.0", "20,10.0"]
        logged(again, 30, 40).save()
        assert table(again.log_dir) == ["step,loss", "10,5.0", "20,10.0", "30,15.0", "40,20.0"]

    def test_a_column_that_is_empty_then_goes_and_comes_again(self, root: str) -> None:
        first = CSVLogger(root, version=0)
        logged(first, 1, 2)
        logged(first, 2, name="late")
        first.save()
        again = CSVLogger(root, version=0)
        again.rewind(1)
        assert table(again.log_dir) == ["step,loss", "1,0.5"]
        logged(again, 2, name="late").save()
        assert table(again.log_dir) == ["step,loss,late", "1,0.5,", "2,,1.0"]

    @pytest.mark.parametrize("write_first", [False, True])
    def test_rows_that_are_held_back_go_too(self, root: str, write_first: bool) -> None:
        logger = CSVLogger(root, version=0)
        logged(logger, 1, 2)
        if write_first:
            logger.save()
        logged(logger, 3, 4)
        logger.rewind(1)
        logged(logger, 2)
        logger.finalize("success")
        assert table(logger.log_dir) == ["step,loss", "1,0.5", "2,1.0"]

    def test_several_times_by_several_objects(self, root: str) -> None:
        logged(CSVLogger(root, version=0), *range(1, 9)).save()
        for step in (6, 4, 4, 2):
            one = CSVLogger(root, version=0)
            one.rewind(step + 1)
            one.rewind(step)
            logged(one, *range(step + 1, 9))
            one.finalize("failed")
            assert table(one.log_dir) == ["step,loss", *(f"{at},{at / 2}" for at in range(1, 9))]
            one.rewind(step)
            logged(one, step + 1).save()
            assert table(one.log_dir) == ["step,loss", *(f"{at},{at / 2}" for at in range(1, step + 2))]
            logged(one, *range(step + 2, 9)).save()

    def test_from_the_beginning(self, root: str) -> None:
        logged(CSVLogger(root, version=0), 0, 1, 2).save()
        again = CSVLogger(root, version=0)
        again.rewind(0)
        assert table(again.log_dir) == ["step,loss", "0,0.0"]
        again.rewind(-1)
        assert table(again.log_dir) == ["step"]
        logged(again, 0).save()
        assert table(again.log_dir) == ["step,loss", "0,0.0"]

    def test_where_nothing_was_written_nothing_is(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path / "logs", version=0)
        logger.rewind(3)
        assert list(tmp_path.iterdir()) == []
        logged(logger, 4).save()
        assert table(logger.log_dir) == ["step,loss", "4,2.0"]

    def test_a_file_without_later_rows_is_left_alone(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path, name="", version="v")
        logged(logger, 1).save()
        path = tmp_path / "v" / "metrics.csv"
        before = path.stat()
        CSVLogger(tmp_path, name="", version="v").rewind(1)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def test_a_row_of_no_known_step_stays_and_one_of_a_spreadsheet_is_understood(self, tmp_path: Path) -> None:
        (tmp_path / "v").mkdir()
        (tmp_path / "v" / "metrics.csv").write_bytes(
            b"\xef\xbb\xbfstep,loss\r\n10.0,1\r\nnote,2\r\n,3\r\nnan,4\r\n30.0,5\r\n"
        )
        CSVLogger(tmp_path, name="", version="v").rewind(20)
        assert table(tmp_path / "v") == ["step,loss", "10.0,1", "note,2", ",3", "nan,4"]

    def test_it_is_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        logged(CSVLogger(tmp_path, name="", version="v"), 1, 2, 3).save()
        before = table(tmp_path / "v")
        logger = CSVLogger(tmp_path, name="", version="v")

        def refuse(source: str, target: str) -> None:
            raise PermissionError(target)

        with monkeypatch.context() as patches:
            patches.setattr("os.replace", refuse)
            with pytest.raises(DrivetrainError, match=r"metrics\.csv below .* cannot be written: PermissionError"):
                logger.rewind(1)
        assert table(tmp_path / "v") == before
        logger.rewind(1)
        assert table(tmp_path / "v") == before[:2]
        assert [path.name for path in (tmp_path / "v").iterdir()] == ["metrics.csv"]
