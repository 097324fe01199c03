"""Writes progress and summaries so that a failing terminal or pipe does not end the run."""

from __future__ import annotations

import logging
import os
from typing import Any

_log = logging.getLogger("drivetrain")

# The texts of the errors about which a warning was logged.
_WARNED: set[str] = set()


def is_terminal(stream: Any) -> bool:
    """Return True if lines on ``stream`` can be rewritten. ``sys.stdout`` may be None, for which this returns False."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (AttributeError, ValueError, OSError):  # None, an object with only a `write`, a closed file
        return False


def write_output(stream: Any, text: str) -> None:
    """Write ``text`` and flush. Characters that the encoding of the stream lacks are replaced by question marks.

    If writing fails, for example because the disk is full or the terminal was closed, a warning is logged once.

    Args:
        stream: an open text file, or an object with a ``write`` method. If it is None, as ``sys.stdout`` in a process
            without console, nothing is written.
        text: the text, including line ends.
    """
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(encoding, "replace").decode(encoding))
        if hasattr(stream, "flush"):
            stream.flush()
    except (OSError, ValueError) as error:
        if str(error) not in _WARNED:
            _WARNED.add(str(error))
            _log.warning("Progress cannot be shown: writing to the output failed (%s). The run continues.", error)
