"""What a rank prints when an error ends it."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import pytest

from drivetrain._distributed.failure import Failure, RankFailedError
from drivetrain._engine.ranks import error_reporting
from drivetrain._engine.ranks.error_reporting import OneLineHook, print_in_one_line


def replaced_stderr(monkeypatch: pytest.MonkeyPatch) -> Mock:
    stream = Mock()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(error_reporting, "_EXIT_DELAY", 0)
    return stream


def test_only_the_marked_error_is_printed_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:  # G-01
    """In one write, since the lines of two ranks would otherwise mix where PYTHONUNBUFFERED is set."""
    stderr = replaced_stderr(monkeypatch)
    previous: list[BaseException] = []
    sys.excepthook = OneLineHook(lambda kind, error, traceback: previous.append(error))
    error, other = RankFailedError(Failure.of_exit(1, -9)), ValueError("ours")
    print_in_one_line(error, "Rank 1 failed")
    for uncaught in (other, error):
        sys.excepthook(type(uncaught), uncaught, None)
    assert previous == [other]
    stderr.write.assert_called_once_with("Rank 1 failed\n")


def test_the_hook_stays_until_the_last_marked_error_is_gone(monkeypatch: Any) -> None:
    stderr = replaced_stderr(monkeypatch)
    first, second = ValueError("first"), ValueError("second")
    second.add_note("Where: rank 1")
    for error, line in ((first, "Rank 1 failed"), (second, "Rank 1 failed again"), (first, "Rank 1 failed first")):
        print_in_one_line(error, line)
    del first, error
    sys.excepthook(ValueError, second, None)
    stderr.write.assert_called_once_with("Rank 1 failed again; Where: rank 1\n")
    del second
    assert sys.excepthook is sys.__excepthook__
    sys.excepthook = print  # a user's hook
    print_in_one_line(ValueError("third"), "Rank 1 failed")
    assert sys.excepthook is print
