"""What a rank prints where it ends."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from drivetrain._distributed.failure import Failure, RankFailedError
from drivetrain._engine import error_reporting
from drivetrain._engine.error_reporting import OneLine


class Unbuffered(StringIO):
    """Notes what goes out at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def listen(monkeypatch: pytest.MonkeyPatch) -> Unbuffered:
    stream = Unbuffered()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(error_reporting, "_WHILE_ANOTHER_TELLS", 0)
    return stream


def test_a_rank_s_last_line_goes_out_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """G-01: else two ranks' lines run into one where PYTHONUNBUFFERED is set."""
    stream = listen(monkeypatch)
    error = RankFailedError(Failure.of_exit(1, -9))
    OneLine(error, "Rank 0 ends")(type(error), error, None)
    assert stream.written == ["Rank 0 ends\n"]


def test_only_its_own_error_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = listen(monkeypatch)
    before: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: before.append(error))
    error, other = ValueError("ours"), ValueError("ours")
    hook = OneLine(error, "Rank 1 failed")
    for one in (other, error):
        hook(type(one), one, None)
    assert before == [other]
    assert stream.written == ["Rank 1 failed\n"]


def test_a_caught_error_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = ValueError("caught")
    error.add_note("Where: rank 1")
    error_reporting.print_in_a_line(error, "Rank 1 failed")
    assert isinstance(sys.excepthook, OneLine)
    del error
    assert sys.excepthook is sys.__excepthook__
