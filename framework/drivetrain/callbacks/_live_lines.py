"""Lines at the bottom of a terminal that are redrawn, with other output printed above them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from drivetrain._runtime.console import is_terminal, write_output

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""Control sequences that make the terminal cut off, or wrap, lines that are longer than the terminal's width."""


class LiveLines:
    """One or more lines at the bottom of a terminal, redrawn by `show`.

    Between two calls the cursor stays at the beginning of the first line. When a terminal becomes narrower, it wraps
    the lines again, and the cursor moves with the beginning of the first line. The next `show` therefore clears all
    lines by clearing everything below the cursor. Some terminals report a new width late (tmux after a quarter of a
    second), so lines that are too long are cut off instead of wrapped.

    After `guard`, printing to ``sys.stdout`` or ``sys.stderr`` clears the lines first.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False
        self.mid_line = False
        """Whether other output ended without a newline. Nothing is drawn until the line of this output is complete."""
        self._guards: list[tuple[str, _ClearingStream]] = []

    @property
    def width(self) -> int:
        """The number of columns that a line may use: all but the last, because text in the last column may wrap."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError, AttributeError):  # The stream is not a file, or is not a terminal.
            columns = 0
        return (columns or shutil.get_terminal_size().columns) - 1

    def show(self, lines: Sequence[str]) -> None:
        """Replace the lines on the terminal by ``lines``, none of which may be longer than `width`."""
        if self.mid_line:
            return
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        write_output(self._stream, f"{_NO_WRAP}\r" + "\x1b[K\r\n".join(lines) + f"\x1b[J{up}\r{_WRAP}")
        self._shown = True

    def clear(self) -> None:
        """Clear the lines from the terminal."""
        if self._shown:
            self._shown = False
            write_output(self._stream, "\r\x1b[J")

    def print(self, text: str) -> None:
        """Clear the lines and print ``text`` on its own line."""
        self.clear()
        write_output(self._stream, f"\n{text}\n" if self.mid_line else f"{text}\n")
        self.mid_line = False

    def guard(self) -> None:
        """Wrap ``sys.stdout`` and ``sys.stderr`` so that other output appears above the lines."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                guard = _ClearingStream(stream, self)
                setattr(sys, name, guard)
                self._guards.append((name, guard))

    def release(self) -> None:
        """Clear the lines and restore ``sys.stdout`` and ``sys.stderr``."""
        self.clear()
        while self._guards:
            name, guard = self._guards.pop()
            if getattr(sys, name) is guard:  # Other code may have replaced the stream since.
                setattr(sys, name, guard.stream)


class _ClearingStream:
    """A stream that clears the lines of a `LiveLines` before each write."""

    def __init__(self, stream: TextIO, lines: LiveLines) -> None:
        self.stream = stream
        self._lines = lines

    def write(self, text: str) -> int:
        if text:
            self._lines.clear()
            self._lines.mid_line = not text.endswith("\n")
        return self.stream.write(text)

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
