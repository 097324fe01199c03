"""Rows that wait for device values, and loggers that fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain._engine.log_queue import LogQueue, _Row
from drivetrain.loggers import Logger


class Keeping(Logger):
    """Records rows, and raises an error at the steps at which its disk is full."""

    name = version = "kept"

    def __init__(self, full_at: tuple[int, ...] = ()) -> None:
        self.full_at = full_at
        self.steps: list[int] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        if step in self.full_at:
            raise OSError(f"no space left at {step}")
        self.steps.append(step)


def test_other_loggers_get_rows_that_one_fails_to_write() -> None:
    # O-04: on a GPU several rows may be left at the end of a run
    full, other = Keeping(full_at=(1, 2)), Keeping()
    queue = LogQueue()
    with pytest.raises(OSError, match="at 1"):
        queue.put([full, other], {"loss": 1.0}, 1)
    for step in (2, 3):  # as if their numbers had not arrived
        queue._rows.append(_Row([full, other], {"loss": 1.0}, step))
    with pytest.raises(OSError, match="at 2"):
        queue.deliver(wait=True)
    assert (full.steps, other.steps) == ([3], [1, 2, 3])
