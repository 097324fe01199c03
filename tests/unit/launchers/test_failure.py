"""Failures of ranks, the values that ranks exchange, and that pickles which an attacker planted stay closed (J-06)."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import stat
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from drivetrain._distributed.child_processes import ScriptProcesses
from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.plain_values import decode, encode
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import Failure, RankFailedError, first_cause
from drivetrain.launchers.launched_processes import LaunchedProcesses


def _failure(error: BaseException, rank: int = 1) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return Failure.of_exception(rank, caught)


def test_an_exception_is_described_with_its_causes() -> None:
    refusal = ConfigurationError("wrong", "because", "do")
    refusal.__cause__ = KeyError("missing")
    failure = _failure(refusal)
    assert failure.error_type == "drivetrain.errors.ConfigurationError"
    assert failure.describe().startswith("Rank 1 failed with drivetrain.errors.ConfigurationError: wrong")
    assert "KeyError: 'missing'" in failure.traceback
    original = failure.load_error()
    assert isinstance(original, ConfigurationError)
    assert (original.what, original.why, original.fix) == ("wrong", "because", "do")


def test_the_first_cause_and_exit_codes_are_described() -> None:  # G-01, G-02
    killed, unnamed, ended = (Failure.of_exit(0, code) for code in (-11, -63, 3))
    assert (killed.signal_name, killed.describe()) == ("SIGSEGV", "Rank 0 was killed by SIGSEGV")
    assert (unnamed.signal_name, unnamed.describe()) == ("signal 63", "Rank 0 was killed by signal 63")
    assert (ended.signal_name, ended.describe()) == (None, "Rank 0 ended with exit code 3")
    lost = _failure(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:3"), rank=0)
    silent = _failure(DistributedError("rank 1 does not answer"), rank=2)
    cause = _failure(ValueError("x"), rank=1)
    later = _failure(ValueError("y"), rank=3)
    killed = Failure.of_exit(4, -9)
    assert first_cause([lost, silent, later, cause, killed]) is cause
    assert first_cause([lost, silent, killed]) is killed
    assert first_cause([lost, silent]) is silent  # it names the rank that did not respond
    assert first_cause([killed, later]) is later


def test_an_error_survives_pickling_and_an_unpicklable_one_is_described() -> None:
    class Unpicklable(Exception):
        def __reduce__(self) -> tuple[object, ...]:
            raise TypeError("no")

    error = RankFailedError(_failure(ValueError("x")))
    again: Any = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DistributedError)
    assert again.failure == error.failure  # type: ignore[attr-defined]
    assert str(again) == str(error)
    assert "in _failure" in str(again)
    failure = _failure(Unpicklable("text"))
    assert (failure.load_error(), failure.message) == (None, "text")


def test_the_first_failure_in_a_file_is_kept_and_a_malformed_file_ignored(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    assert Failure.read(str(path)) is None
    first = _failure(ValueError("first"))
    first.write(str(path))
    _failure(ValueError("second")).write(str(path))
    assert Failure.read(str(path)) == replace(first, pickled_error=None)
    assert os.listdir(tmp_path) == ["failure"]
    for malformed in ('{"other": 1}', "{"):
        path.write_text(malformed)
        assert Failure.read(str(path)) is None


def test_a_pickle_in_the_store_is_not_opened(tmp_path: Path) -> None:  # J-06
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trace"),)

    failure = Failure(1, error_type="ValueError", message="planted", pickled_error=pickle.dumps(Planted()))
    assert failure.load_error() is None  # a folder is no exception,
    (tmp_path / "trace").rmdir()  # but it shows that unpickling works
    planted = json.dumps(asdict(failure) | {"pickled_error": pickle.dumps(Planted()).decode("latin1")})
    file, store = tmp_path / "failure", HashStore()
    file.write_text(planted)
    store.add("failures", 1)
    store.set("failure/1", planted)
    store.set("left/first", planted)
    world = LaunchedProcesses(Placement(0, 2, 0, 2), "function", store=store)
    found = [GroupControl(None, store, 0, 2).failures.first(), *world.failures(), Failure.read(str(file))]
    assert [(one.message, one.load_error()) for one in found if one is not None] == [("planted", None)] * 3
    assert not (tmp_path / "trace").exists()


def test_a_failure_is_text_in_the_store_and_error_files_are_writable_only_for_this_user() -> None:  # J-06
    failure = Failure.of_exception(1, ValueError("text"))
    assert isinstance(failure.load_error(), ValueError)
    again = Failure.decode(failure.encode())
    assert (again.error_type, again.message, again.traceback) == ("ValueError", "text", failure.traceback)
    assert again.load_error() is None
    processes = ScriptProcesses(["/bin/sleep", "60"], {1: {}})
    try:
        folder = Path(processes._error_files.name)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    finally:
        processes.end(kill=True)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(2**70), 0.1, math.inf, -math.inf, "text with \udc80 and \N{SNOWMAN}", [], (), {}),
        [1, [2.5, None], (3, (4, "x"))],
        {"a": (1, 2), "b": {"c": [()]}},
        {0: "a", (1, 2): {"b": (3,)}, "c": None},
        {"$tuple": [1]},
        {"$pairs": [[1, 2]], "x": 1},
        [{"$tuple": [1]}, ({"$x": (1,)},)],
    ],
)
def test_a_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    again = decode(encode(value))
    assert repr(again) == repr(value)
    assert again == value


def test_subclasses_become_plain_and_other_values_and_pickles_are_refused() -> None:  # J-06
    Named = namedtuple("Named", ["name", "number"])
    values: list[Any] = [math.nan, Named("x", 1), signal.SIGINT, MappingProxyType({"a": 1})]
    nan, *again = decode(encode(values))
    assert math.isnan(nan)
    assert again == [("x", 1), 2, {"a": 1}]
    assert [type(value) for value in again] == [tuple, int, dict]
    for value in ({1, 2}, object(), b"bytes", torch.zeros(1), torch.float32):
        with pytest.raises(TypeError, match=type(value).__name__):
            encode({"a": [(value,)]})
    with pytest.raises(ValueError, match=r"decode|JSON|Expecting"):
        decode(pickle.dumps([1]))
