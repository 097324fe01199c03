"""A terminal emulator: computes what is on the screen after the bytes that a program has written."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Sequence


class Screen:
    """Interprets the control sequences that a progress bar uses, and fails for others.

    As in xterm, lines are not wrapped again after a resize. Rows that have scrolled away are kept.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._rows: list[str] = [""]
        self._row = self._column = 0
        self._wraps = True
        self._continuation_rows: set[int] = set()  # rows that continue the previous one
        self._incomplete = ""

    @property
    def lines(self) -> list[str]:
        """The rows that are not empty."""
        return [row.rstrip() for row in self._rows if row.strip()]

    @property
    def paragraphs(self) -> list[str]:
        """The lines that were written, with wrapped rows joined."""
        lines: list[str] = []
        for index, row in enumerate(self._rows):
            if index in self._continuation_rows:
                lines[-1] += row
            else:
                lines.append(row)
        return [line.rstrip() for line in lines if line.strip()]

    def feed(self, text: str) -> None:
        """Process output. An incomplete control sequence at its end is kept for the next call."""
        text = self._incomplete + text
        cut = re.search(r"\x1b(\[[0-9;?]*)?$", text)
        self._incomplete = text[cut.start() :] if cut else ""
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", text[: len(text) - len(self._incomplete)]):
            self._process(part)

    def _process(self, part: str) -> None:
        if part == "\r":
            self._column = 0
        elif part == "\n":
            self._down()
        elif part == "\x1b[K":
            self._rows[self._row] = self._rows[self._row][: self._column]
        elif part == "\x1b[J":
            self._rows[self._row] = self._rows[self._row][: self._column]
            del self._rows[self._row + 1 :]
        elif re.fullmatch(r"\x1b\[\d*A", part):
            self._row -= int(part[2:-1] or 1)
            assert self._row >= 0
        elif part in ("\x1b[?7l", "\x1b[?7h"):
            self._wraps = part[-1] == "h"
        elif re.fullmatch(r"\x1b\[[\d;]*m", part):
            pass  # a color
        else:
            assert part.isprintable(), repr(part)
            self._put(part)

    def _put(self, character: str) -> None:
        if self._column >= self.columns:
            if self._wraps:
                self._column = 0
                self._down()
                self._continuation_rows.add(self._row)
            else:
                self._column = self.columns - 1
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        self._continuation_rows.discard(self._row)
        if self._row == len(self._rows):
            self._rows.append("")


def run_in_terminal(
    command: Sequence[str], columns: int, resized: Callable[[Screen], int | None] = lambda screen: None
) -> tuple[Screen, list[list[str]], str, int]:
    """Run ``command`` with a pseudo-terminal for its output.

    Args:
        command: the command line.
        columns: the initial width of the terminal.
        resized: called after each piece of output; returns the new width, or None to keep it.

    Returns:
        The final screen, the lines on it after each piece of output, all output, and the exit code.
    """
    controller, terminal = pty.openpty()
    _set_size(terminal, columns)
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=variables | {"TERM": "xterm"})
    os.close(terminal)
    screen, frames, written, pending = Screen(columns), [], "", b""
    while True:
        try:
            part = os.read(controller, 4096)
        except OSError:  # on Linux: the other end has been closed
            break
        if not part:
            break
        pending += part
        text = pending.decode(errors="ignore")
        pending = pending[len(text.encode()) :]
        written += text
        screen.feed(text)
        frames.append(screen.lines)
        new_columns = resized(screen)
        if new_columns is not None:
            screen.columns = new_columns
            _set_size(controller, new_columns)
    os.close(controller)
    return screen, frames, written, process.wait(timeout=60)


def _set_size(file_descriptor: int, columns: int) -> None:
    """Set the width of a pseudo-terminal, given either of its file descriptors."""
    fcntl.ioctl(file_descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
