"""What a rank prints where it ends."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from drivetrain.engine.telling import OneLine
from drivetrain.failure import Failure, RankFailedError


class Unbuffered(StringIO):
    """Notes what goes out at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def test_a_rank_s_last_line_goes_out_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """G-01: else two ranks' lines run into one where PYTHONUNBUFFERED is set."""
    error, stream = RankFailedError(Failure.of_exit(1, -9)), Unbuffered()
    monkeypatch.setattr(sys, "stderr", stream)
    OneLine(error, "Rank 0 ends")(type(error), error, None)
    assert stream.written == ["Rank 0 ends\n"]
