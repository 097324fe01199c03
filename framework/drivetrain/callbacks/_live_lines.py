"""Lines at the bottom of a terminal that are rewritten, and what others print above them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from drivetrain._runtime.terminal_output import is_terminal, write_output

_CUT, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""What a terminal does with a line that is longer than it is wide."""


class LiveLines:
    """One or several lines that `show` rewrites.

    Between two calls the cursor stays at the beginning of the first line. A terminal that is made narrower breaks the
    lines anew and keeps the cursor with its text, so that the next `show` finds all that is left of them below it. Some
    say late how wide they are (tmux a quarter of a second later): what is too long by then is cut off, not wrapped.

    While `guard` is in force, ``sys.stdout`` and ``sys.stderr`` take the lines down before they print.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False
        self.within_a_line = False
        """Whether somebody has printed the beginning of a line and not its end: nothing is drawn until then."""
        self._guards: list[tuple[str, _Guard]] = []

    @property
    def width(self) -> int:
        """Columns that a line may have, without the last one, behind which a terminal goes on to the next line."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError, AttributeError):  # no file, or one that does not say
            columns = 0
        return (columns or shutil.get_terminal_size().columns) - 1

    def show(self, lines: Sequence[str]) -> None:
        """Put ``lines`` in place of those that are there. None of them may be longer than `width`."""
        if self.within_a_line:
            return
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        write_output(self._stream, f"{_CUT}\r" + "\x1b[K\r\n".join(lines) + f"\x1b[J{up}\r{_WRAP}")
        self._shown = True

    def clear(self) -> None:
        """Take the lines down."""
        if self._shown:
            self._shown = False
            write_output(self._stream, "\r\x1b[J")

    def print(self, text: str) -> None:
        """Print ``text`` on lines of its own, where the lines were."""
        self.clear()
        write_output(self._stream, f"\n{text}\n" if self.within_a_line else f"{text}\n")
        self.within_a_line = False

    def guard(self) -> None:
        """Let what anybody prints appear above the lines."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                guard = _Guard(stream, self)
                setattr(sys, name, guard)
                self._guards.append((name, guard))

    def release(self) -> None:
        """Take the lines down, and give ``sys.stdout`` and ``sys.stderr`` back."""
        self.clear()
        while self._guards:
            name, guard = self._guards.pop()
            if getattr(sys, name) is guard:  # else somebody has put another one there since
                setattr(sys, name, guard.stream)


class _Guard:
    """A stream on the terminal that takes the lines down before it prints."""

    def __init__(self, stream: TextIO, lines: LiveLines) -> None:
        self.stream = stream
        self._lines = lines

    def write(self, text: str) -> int:
        if text:
            self._lines.clear()
            self._lines.within_a_line = not text.endswith("\n")
        return self.stream.write(text)

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
