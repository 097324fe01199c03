"""Functions of rank 0: ours name the line that called them, and those of lightning_utilities know the rank."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

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


@pytest.mark.parametrize(
    ("variables", "before", "is_called"),
    [
        ({}, "", True),
        ({"RANK": "1"}, "", False),
        ({"RANK": "1", "LOCAL_WORLD_SIZE": ""}, "", True),
        ({"RANK": "1"}, "rank_zero_only.rank = 0", True),
    ],
    ids=["no ranks", "rank 1", "not a rank", "set before"],
)
def test_the_import_sets_the_rank_of_lightning_utilities(
    variables: dict[str, str], before: str, is_called: bool
) -> None:
    # S-18
    script = f"""
from lightning_utilities.core.rank_zero import rank_zero_only
{before}
import drivetrain
rank_zero_only(lambda: print("called"))()
"""
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} if variables else {}
    environment = {**os.environ, **world, **variables}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (0, "called\n" if is_called else ""), done.stderr
