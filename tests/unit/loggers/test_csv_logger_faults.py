"""CSVLogger with a store or a disk that fails. J-13"""

from __future__ import annotations

import logging
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain.errors import DrivetrainError
from drivetrain.loggers import CSVLogger, csv_logger
from faulty_store import FaultyStore

URL = "faulty://store/logs"
KEY = "logs/version_0/metrics.csv"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(csv_logger, "_RETRY_DELAYS", (0.01, 0.01))
    return FaultyStore(tmp_path / "store").mount()


def logger(every: int = 100) -> CSVLogger:
    return CSVLogger(URL, name="", version=0, flush_logs_every_n_steps=every)


def log(one: CSVLogger, *steps: int) -> CSVLogger:
    for step in steps:
        one.log_metrics({"loss": step / 2}, step)
    return one


def steps(store: FaultyStore) -> list[int]:
    header, *rows = (store.folder / KEY).read_text().splitlines()
    assert header.startswith("step")
    return [int(row.split(",")[0]) for row in rows]


class TestAStore:
    """J-13"""

    @pytest.mark.parametrize("operation", ["size", "get", "list", "put", "remove", "*"])
    @pytest.mark.parametrize("lost", [False, True])
    def test_that_refuses_for_a_moment_loses_no_row(self, store: FaultyStore, operation: str, lost: bool) -> None:
        log(logger(), 1, 2).save()
        store.fail(operation, lost=lost, times=2)
        one = log(logger(), 3)
        one.save()
        log(one, 4).save()
        assert steps(store) == [1, 2, 3, 4]

    def test_that_does_not_say_what_is_there_is_not_written_over(self, store: FaultyStore) -> None:
        log(logger(), 1, 2).save()
        for operation in ("size", "get", "list"):
            store.fail(operation, times=None)
        one = log(logger(), 3)
        with pytest.raises(DrivetrainError, match=r"metrics\.csv below 'faulty.*503 Slow Down"):
            one.save()
        assert steps(store) == [1, 2]
        store.heal()
        one.save()
        assert steps(store) == [1, 2, 3]

    @pytest.mark.parametrize("lost", [False, True])
    def test_what_could_not_be_written_is_written_with_the_next(
        self, store: FaultyStore, lost: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        one = log(logger(every=1), 1, 2)
        store.fail("put", lost=lost, times=None)
        with caplog.at_level(logging.WARNING, "drivetrain"):
            log(one, 3, 4, 5)  # the run goes on
        assert caplog.text.count("The run continues") == 1
        assert "503 Slow Down" in caplog.text
        with pytest.raises(DrivetrainError, match="503 Slow Down"):
            one.finalize("success")
        store.heal()
        log(one, 6)
        one.finalize("success")
        assert steps(store) == [1, 2, 3, 4, 5, 6]

    def test_that_has_refused_is_asked_once_until_it_takes_something(self, store: FaultyStore) -> None:
        one = log(logger(every=1), 1, 2)
        store.fail("put", times=None)
        log(one, 3)
        before = len(store.calls)
        log(one, 4)
        assert [operation for operation, _ in store.calls[before:]].count("put") == 1

    def test_a_new_column_that_could_not_be_written_comes_later(self, store: FaultyStore) -> None:
        one = log(logger(), 1)
        one.save()
        one.log_metrics({"acc": 0.5}, 2)
        store.fail("put", times=None)
        with pytest.raises(DrivetrainError):
            one.save()
        store.heal()
        log(one, 3).save()
        assert (store.folder / KEY).read_text() == "step,loss,acc\n1,0.5,\n2,,0.5\n3,1.5,\n"

    @pytest.mark.parametrize("lost", [False, True])
    @pytest.mark.parametrize("operation", ["put", "get"])
    def test_rewinding_is_tried_again_and_then_an_error(self, store: FaultyStore, operation: str, lost: bool) -> None:
        log(logger(), *range(1, 7)).save()
        store.fail(operation, lost=lost, times=2)
        logger().rewind(4)
        assert steps(store) == [1, 2, 3, 4]
        store.fail(operation, times=None)
        one = logger()
        with pytest.raises(DrivetrainError, match="503 Slow Down"):
            one.rewind(2)
        assert steps(store) == [1, 2, 3, 4]
        store.heal()
        one.rewind(2)
        log(one, 3).save()
        assert steps(store) == [1, 2, 3]

    def test_what_an_answer_was_lost_of_is_rewound_too(self, store: FaultyStore) -> None:
        one = log(logger(every=1), 1, 2)
        store.fail("put", lost=True, times=None)
        log(one, 3, 4)
        store.heal()
        one.rewind(2)
        assert steps(store) == [1, 2]
        log(one, 3).save()
        assert steps(store) == [1, 2, 3]

    def test_where_nothing_was_written_rewinding_writes_nothing(self, store: FaultyStore) -> None:
        logger().rewind(5)
        assert store.objects() == []

    def test_the_table_is_whole_at_every_moment(self, store: FaultyStore) -> None:
        one = log(logger(), 1, 2)
        one.save()
        seen: list[list[int]] = []
        store.fail("*", error=None, times=None, call=lambda: seen.append(steps(store)))
        log(one, 3).save()
        one.rewind(1)
        store.heal()
        assert {len(rows) for rows in seen} <= {1, 2, 3}
        assert steps(store) == [1]
        assert store.objects() == [KEY]

    def test_who_is_denied_is_told_at_once(self, store: FaultyStore) -> None:
        store.fail("put", error=PermissionError("no right"), times=None)
        with pytest.raises(DrivetrainError, match="no right"):
            log(logger(), 1).save()
        assert [operation for operation, _ in store.calls].count("put") == 1


@contextmanager
def room(nbytes: int) -> Iterator[None]:
    """No file of this process may become larger: as on a disk that is full, the write fails midway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


class TestADisk:
    """J-13"""

    @pytest.mark.parametrize("column", ["loss", "new"])
    def test_that_is_full_keeps_whole_rows_and_gets_the_others_later(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str
    ) -> None:
        one = log(CSVLogger(tmp_path, name="", version="v", flush_logs_every_n_steps=3), *range(4))
        path = tmp_path / "v" / "metrics.csv"
        before = path.read_text()
        with caplog.at_level(logging.WARNING, "drivetrain"), room(len(before) + 10):
            log(one, 4, 5)
            one.log_metrics({column: 3.0}, 6)
        with room(len(before) + 10), pytest.raises(DrivetrainError, match="File too large"):
            one.save()
        assert caplog.text.count("The run continues") == 1
        assert path.read_text() == before
        assert [child.name for child in path.parent.iterdir()] == ["metrics.csv"]
        log(one, 7)
        one.finalize("success")
        rows = path.read_text().splitlines()[1:]
        assert [int(row.split(",")[0]) for row in rows] == list(range(8))
