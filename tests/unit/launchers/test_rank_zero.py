"""Functions of rank 0: ours name the line that called them, and those of lightning_utilities know the rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drivetrain import rank_zero_info, rank_zero_warn


def test_messages_name_the_line_that_called(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "drivetrain"):
        rank_zero_info("trained for %d epochs", 3)
    with pytest.warns(UserWarning, match="careful") as caught:
        rank_zero_warn("careful")
    (record,) = caplog.records
    assert (record.getMessage(), record.pathname) == ("trained for 3 epochs", __file__)
    assert caught[0].filename == __file__


_SCRIPT = """
import os, sys, torch
from lightning_utilities.core.rank_zero import rank_zero_only
world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
for variables, before in (
    ({}, None), (world | {"RANK": "1"}, None), (world | {"RANK": "1", "LOCAL_WORLD_SIZE": ""}, None),
    (world | {"RANK": "1"}, 0),
):
    if os.fork() == 0:
        os.environ.update(variables)
        if before is not None:
            rank_zero_only.rank = before
        import drivetrain
        rank_zero_only(lambda: os.write(1, f"{variables} {before}\\n".encode()))()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_the_import_sets_the_rank_of_lightning_utilities() -> None:  # S-18
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120)
    world = "{'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '2', 'RANK': '1'}"
    no_rank = world.replace("'LOCAL_WORLD_SIZE': '2'", "'LOCAL_WORLD_SIZE': ''")
    assert done.stdout.splitlines() == ["{} None", f"{no_rank} None", f"{world} 0"], done.stderr
