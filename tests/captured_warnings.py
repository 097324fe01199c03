"""Captures what the engine logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def captured_warnings(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the lines that the logger "drivetrain" receives at ``level`` or above."""
    lines: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("drivetrain")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, before or level))
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
