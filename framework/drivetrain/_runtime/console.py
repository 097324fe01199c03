"""Shows log messages, progress and summaries on the console, so that neither it nor the user's logging is disturbed.

A failing terminal or pipe does not end the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_LOGGER = logging.getLogger("drivetrain")


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


def is_terminal(stream: Any) -> bool:
    """Return True if lines on ``stream`` can be rewritten. ``sys.stdout`` may be None, for which this returns False."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (AttributeError, ValueError, OSError):  # None, an object with only a `write`, a closed file
        return False


def write_output(stream: Any, text: str) -> None:
    """Write ``text`` and flush. Characters that the encoding of the stream lacks are replaced by question marks.

    A run goes on if writing fails, for example because the disk is full or the terminal was closed.

    Args:
        stream: an open text file, or an object with a ``write`` method. If it is None, as ``sys.stdout`` in a process
            without console, nothing is written.
        text: the text, including line ends.
    """
    if stream is None:
        return
    with suppress(OSError, ValueError):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        if hasattr(stream, "flush"):
            stream.flush()
