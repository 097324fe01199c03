"""Shows the framework's log messages on the console unless the user has configured logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOGGER = logging.getLogger("drivetrain")

_LOGGED: set[str] = set()
"""Messages that `log_once` has logged in this process."""


def log_once(text: str) -> None:
    """Log ``text``, a message that would be the same for every run, once per process."""
    if text not in _LOGGED and _LOGGER.isEnabledFor(logging.INFO):
        _LOGGED.add(text)
        _LOGGER.info(text)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to the current ``sys.stderr``, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


@contextmanager
def log_to_console(enabled: bool) -> Iterator[None]:
    """Write the framework's messages to standard error within the block, unless logging is configured already.

    Args:
        enabled: whether to show messages. If False, as on ranks other than 0, logging is unchanged.
    """
    if not enabled or _LOGGER.hasHandlers() or _LOGGER.level != logging.NOTSET:
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
