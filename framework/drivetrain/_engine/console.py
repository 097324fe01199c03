"""What a run says about itself, heard where the user has not set up logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("drivetrain")


@contextmanager
def heard(listen: bool) -> Iterator[None]:
    """Within it the framework's messages go to standard error, unless the user's handlers take them already.

    Args:
        listen: False leaves logging as it is: on other ranks than the first, and where nothing is to be shown.
    """
    if not listen or _LOGGER.hasHandlers() or _LOGGER.level != logging.NOTSET:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        _LOGGER.setLevel(logging.NOTSET)
