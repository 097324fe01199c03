"""Writing for people: what a run shows must not end it."""

from __future__ import annotations

import logging
import os
from typing import Any

_log = logging.getLogger("drivetrain")

_TOLD: set[str] = set()


def is_terminal(stream: Any) -> bool:
    """Whether lines that are on ``stream`` can be rewritten. False where there is none (``sys.stdout`` may be None)."""
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (AttributeError, ValueError, OSError):  # None, an object of somebody's with a write alone, a closed file
        return False


def write_for_people(stream: Any, text: str) -> None:
    """Write ``text`` and flush. What the stream's encoding does not have becomes a question mark.

    Where the disk is full, or the reader or the terminal is gone, a warning says so once, and the caller goes on.

    Args:
        stream: an open text file, or what has a ``write``; None, which a process without a console has, writes nowhere.
        text: with its line ends.
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
        if str(error) not in _TOLD:
            _TOLD.add(str(error))
            _log.warning("Progress cannot be shown: the output refuses it (%s). The run goes on.", error)
