"""CSVLogger with a store or a disk that fails. J-13"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from services import log_steps, read_table

from drivetrain.errors import DrivetrainError
from drivetrain.loggers import CSVLogger, csv_logger
from faulty_store import FaultyStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(csv_logger, "_RETRY_DELAYS", (0.01, 0.01))
    return FaultyStore(tmp_path / "store").mount()


def logger_at_the_store(flush_every: int = 100) -> CSVLogger:
    return CSVLogger("faulty://store/logs", name="", version=0, flush_logs_every_n_steps=flush_every)


def steps_in(store: FaultyStore) -> list[int]:
    header, *rows = read_table(store.folder / "logs/version_0")
    assert header.startswith("step")
    return [int(row.split(",")[0]) for row in rows]


@pytest.mark.parametrize("operation", ["size", "get", "list", "put", "remove", "*"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_store_that_refuses_for_a_moment_loses_no_row(store: FaultyStore, operation: str, lost: bool) -> None:  # J-13
    log_steps(logger_at_the_store(), 1, 2).save()
    store.fail(operation, lost=lost, times=2)
    logger = log_steps(logger_at_the_store(), 3)
    logger.save()
    log_steps(logger, 4).save()
    assert steps_in(store) == [1, 2, 3, 4]


def test_a_table_that_cannot_be_read_is_not_replaced(store: FaultyStore) -> None:  # J-13
    log_steps(logger_at_the_store(), 1, 2).save()
    for operation in ("size", "get", "list"):
        store.fail(operation, times=None)
    logger = log_steps(logger_at_the_store(), 3)
    with pytest.raises(DrivetrainError, match=r"metrics\.csv below 'faulty.*503 Slow Down"):
        logger.save()
    assert steps_in(store) == [1, 2]
    store.heal()
    logger.save()
    assert steps_in(store) == [1, 2, 3]


@pytest.mark.parametrize("lost", [False, True])
def test_rows_that_could_not_be_written_are_written_with_the_next(store: FaultyStore, lost: bool, caplog: Any) -> None:
    # J-13
    logger = log_steps(logger_at_the_store(flush_every=1), 1, 2)
    store.fail("put", lost=lost, times=None)
    before = len(store.calls)
    log_steps(logger, 3, 4, 5)  # the run continues
    # After a failure, writes are not retried. (A put whose answer was lost is repeated.)
    assert [operation for operation, _ in store.calls[before:]].count("put") == (3 + 1 + 1) * (1 + lost)
    assert caplog.text.count("The run continues") == 1
    assert "503 Slow Down" in caplog.text
    with pytest.raises(DrivetrainError, match="503 Slow Down"):
        logger.finalize("success")
    store.heal()
    log_steps(logger, 6).finalize("success")
    assert steps_in(store) == [1, 2, 3, 4, 5, 6]
    store.fail("put", lost=lost, times=None)
    log_steps(logger, 7, 8)
    store.heal()
    logger.rewind(6)  # also rows whose confirmation was lost
    assert steps_in(store) == [1, 2, 3, 4, 5, 6]


def test_a_missing_permission_is_reported_at_once(store: FaultyStore) -> None:
    store.fail("put", error=PermissionError("no right"), times=None)
    with pytest.raises(DrivetrainError, match="no right"):
        log_steps(logger_at_the_store(), 1).save()
    assert [operation for operation, _ in store.calls].count("put") == 1


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("operation", ["put", "get"])
def test_a_rewind_is_retried_before_it_fails(store: FaultyStore, operation: str, lost: bool) -> None:  # J-13
    log_steps(logger_at_the_store(), *range(1, 7)).save()
    store.fail(operation, lost=lost, times=2)
    logger_at_the_store().rewind(4)
    assert steps_in(store) == [1, 2, 3, 4]
    store.fail(operation, times=None)
    logger = logger_at_the_store()
    with pytest.raises(DrivetrainError, match="503 Slow Down"):
        logger.rewind(2)
    assert steps_in(store) == [1, 2, 3, 4]
    store.heal()
    logger.rewind(2)
    log_steps(logger, 3).save()
    assert steps_in(store) == [1, 2, 3]


def test_the_table_is_whole_at_every_moment(store: FaultyStore) -> None:  # J-13
    logger = log_steps(logger_at_the_store(), 1, 2)
    logger.save()
    seen: list[list[int]] = []
    store.fail("*", error=None, times=None, call=lambda: seen.append(steps_in(store)))
    log_steps(logger, 3).save()
    logger.rewind(1)
    store.heal()
    assert {len(rows) for rows in seen} <= {1, 2, 3}
    assert steps_in(store) == [1]
    assert store.objects() == ["logs/version_0/metrics.csv"]


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Limit the files of this process: as on a disk that is full, a write fails midway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("column", ["loss", "new"])
def test_a_full_disk_keeps_whole_rows_and_gets_the_others_later(tmp_path: Path, caplog: Any, column: str) -> None:
    # J-13
    logger = log_steps(CSVLogger(tmp_path, name="", version="v", flush_logs_every_n_steps=3), *range(4))
    path = tmp_path / "v" / "metrics.csv"
    before = path.read_text()
    with file_size_limit(len(before) + 10):
        log_steps(logger, 4, 5)
        log_steps(logger, 6, name=column)
        with pytest.raises(DrivetrainError, match="File too large"):
            logger.save()
    assert caplog.text.count("The run continues") == 1
    assert path.read_text() == before
    assert [child.name for child in path.parent.iterdir()] == ["metrics.csv"]
    log_steps(logger, 7).finalize("success")
    assert [int(row.split(",")[0]) for row in read_table(path.parent)[1:]] == list(range(8))
