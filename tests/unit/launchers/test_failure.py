from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import Failure, RankFailedError, first_cause


def _failure(error: BaseException, rank: int = 1) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return Failure.of_exception(rank, caught)


def test_an_exception_is_described_with_its_causes() -> None:
    try:
        try:
            _ = dict[str, str]()["missing"]
        except KeyError as error:
            raise ConfigurationError("wrong", "because", "do") from error
    except ConfigurationError as caught:
        failure = Failure.of_exception(2, caught)
    assert failure.error_type == "drivetrain.errors.ConfigurationError"
    assert failure.describe().startswith("Rank 2 failed with drivetrain.errors.ConfigurationError: wrong")
    assert "KeyError: 'missing'" in failure.traceback
    original = failure.load_error()
    assert isinstance(original, ConfigurationError)
    assert (original.what, original.why, original.fix) == ("wrong", "because", "do")


@pytest.mark.parametrize(
    ("code", "name", "text"),
    [
        (-11, "SIGSEGV", "Rank 0 was killed by SIGSEGV"),
        (-63, "signal 63", "Rank 0 was killed by signal 63"),
        (3, None, "Rank 0 ended with exit code 3"),
    ],
)
def test_exit_codes_are_described(code: int, name: str | None, text: str) -> None:  # G-02
    failure = Failure.of_exit(0, code)
    assert failure.signal_name == name
    assert failure.describe() == text


def test_an_error_survives_pickling_and_an_unpicklable_one_is_described() -> None:
    error = RankFailedError(_failure(ValueError("x")))
    again: Any = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DistributedError)
    assert again.failure == error.failure  # type: ignore[attr-defined]
    assert str(again) == str(error)
    assert "in _failure" in str(again)
    failure = _failure(_Unpicklable("text"))
    assert (failure.load_error(), failure.message) == (None, "text")


def test_a_failure_is_written_to_a_file_and_the_first_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    assert Failure.read(str(path)) is None
    first = _failure(ValueError("first"))
    first.write(str(path))
    _failure(ValueError("second")).write(str(path))
    assert Failure.read(str(path)) == first
    assert [file.name for file in tmp_path.iterdir()] == ["failure"]
    path.write_text(json.dumps({"other": 1}))
    assert Failure.read(str(path)) is None
    path.write_text("{")
    assert Failure.read(str(path)) is None


class _Unpicklable(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("no")


def test_the_first_cause() -> None:  # G-01, G-02
    lost = _failure(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:3"), rank=0)
    silent = _failure(DistributedError("rank 1 does not answer"), rank=2)
    cause = _failure(ValueError("x"), rank=1)
    later = _failure(ValueError("y"), rank=3)
    killed = Failure.of_exit(4, -9)
    assert first_cause([lost, silent, later, cause, killed]) is cause
    assert first_cause([lost, silent, killed]) is killed
    assert first_cause([lost, silent]) is silent  # it names the rank that did not respond
    assert first_cause([killed, later]) is later
