"""Records the lines of user code that call operators, as numbers."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from drivetrain.testing import _rank_process

_MAX_LINES = 6  # the maximum number of lines per place in the code
_TORCH_FOLDER = str(Path(torch.__file__).parent)
# Paths that are not user code: the standard library, and the module that calls test functions on ranks.
_SKIPPED_PATHS = (
    str(Path(os.__file__).parent),
    _rank_process.__file__,
    "<frozen",
    "<string>",
)
_SITE_PACKAGES = (
    f"{os.sep}site-packages{os.sep}"  # this folder may be below the standard library, but contains user code
)
_EMULATION_FOLDER = str(Path(__file__).parent)

Site = tuple[tuple[CodeType, int], ...]


class Sites:
    """Assigns numbers to places in the code. The extension requests a number for each operator call."""

    def __init__(self) -> None:
        self._numbers: dict[Site, int] = {}
        self._sites: list[Site] = []

    def current_number(self) -> int:
        """Return the number of the caller's place in the code."""
        frame = sys._getframe().f_back
        backward = frame is None
        if backward:
            # The caller is an autograd thread, which executes the call of `backward` in the main thread.
            main = threading.main_thread().ident
            frame = sys._current_frames().get(main) if main is not None else None
        site = _lines(frame)
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = len(self._sites)
            self._sites.append(site)
        return number * 2 + backward

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the lines of a place in the code, the innermost first."""
        if number < 0:
            return ()
        site, backward = self._sites[number // 2], number % 2
        lines = tuple(f"{code.co_filename}:{line} in {code.co_name}" for code, line in site)
        return ("(in backward)", *lines) if backward else lines


def _lines(frame: FrameType | None) -> Site:
    lines: list[tuple[CodeType, int]] = []
    while frame is not None and len(lines) < _MAX_LINES:
        if not _is_skipped(frame.f_code.co_filename):
            lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


@cache
def _is_skipped(path: str) -> bool:
    return path.startswith((_TORCH_FOLDER, _EMULATION_FOLDER)) or (
        path.startswith(_SKIPPED_PATHS) and _SITE_PACKAGES not in path
    )
