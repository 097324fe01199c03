"""``rank_zero_info`` and ``rank_zero_warn`` name the line that called them (Q-11)."""

from __future__ import annotations

import logging

import pytest

from drivetrain import rank_zero_info, rank_zero_warn


def test_messages_name_the_line_that_called(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "drivetrain"):
        rank_zero_info("trained for %d epochs", 3)
    with pytest.warns(UserWarning, match="careful") as caught:
        rank_zero_warn("careful")
    (record,) = caplog.records
    assert (record.getMessage(), record.pathname) == ("trained for 3 epochs", __file__)
    assert caught[0].filename == __file__
