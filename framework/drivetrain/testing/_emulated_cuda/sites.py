"""Where the host was when it called an operator: lines of the user's code, by number."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_DEPTH = 6
_TORCH = str(Path(torch.__file__).parent)
# The standard library, and what calls a test's functions on ranks.
_LEFT_OUT = (str(Path(os.__file__).parent), str(Path(__file__).parents[1] / "_rank_process.py"), "<frozen", "<string>")
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"  # may lie below the standard library, and are no part of it
_OWN = str(Path(__file__).parent)

Site = tuple[tuple[CodeType, int], ...]


class Sites:
    """Numbers for places in the code; the extension asks for one at each operator, so that no text is made there."""

    def __init__(self) -> None:
        self._numbers: dict[Site, int] = {}
        self._sites: list[Site] = []

    def here(self) -> int:
        """Return the number of the caller's place."""
        frame = sys._getframe().f_back
        backward = frame is None
        if backward:
            # A thread of autograd's: what it does is asked for by one that waits in `backward`.
            main = threading.main_thread().ident
            frame = sys._current_frames().get(main) if main is not None else None
        place = _lines(frame)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._sites)
            self._sites.append(place)
        return number * 2 + backward

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the lines of a place, the innermost first."""
        if number < 0:
            return ()
        place, backward = self._sites[number // 2], number % 2
        lines = tuple(f"{code.co_filename}:{line} in {code.co_name}" for code, line in place)
        return ("(in backward)", *lines) if backward else lines


def _lines(frame: FrameType | None) -> Site:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEPTH:
        if not _left_out(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@cache
def _left_out(path: str) -> bool:
    return path.startswith((_TORCH, _OWN)) or (path.startswith(_LEFT_OUT) and _SITE_PACKAGES not in path)
