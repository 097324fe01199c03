"""What a run says about itself: heard where the user has not set up logging, and some of it once a process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOGGER = logging.getLogger("drivetrain")

_SAID: set[str] = set()
"""What this process has said and need not say again."""


def say_once(text: str) -> None:
    """Log ``text`` unless this process has logged it before: what is as true of the next run is said by the first."""
    if text not in _SAID and _LOGGER.isEnabledFor(logging.INFO):
        _SAID.add(text)
        _LOGGER.info(text)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to ``sys.stderr`` as it is at the time: a progress bar puts something there that makes room."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


@contextmanager
def log_to_console(listen: bool) -> Iterator[None]:
    """Within it the framework's messages go to standard error, unless the user's handlers take them already.

    Args:
        listen: False leaves logging as it is: on other ranks than the first, and where nothing is to be shown.
    """
    if not listen or _LOGGER.hasHandlers() or _LOGGER.level != logging.NOTSET:
        yield
        return
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("%(message)s"))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(logging.NOTSET)
