"""What stands on a terminal after the bytes that a program has written to it."""

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
    """Interprets what a progress bar needs of a terminal; refuses what it does not know.

    Lines are never broken anew, as on xterm. Rows that have scrolled away are kept.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._rows: list[str] = [""]
        self._row = self._column = 0
        self._wraps = True
        self._goes_on: set[int] = set()  # rows that go on with the one before
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        """The rows that hold anything."""
        return [row.rstrip() for row in self._rows if row.strip()]

    @property
    def paragraphs(self) -> list[str]:
        """What was written as a line each, whether it takes one row or several."""
        whole: list[str] = []
        for index, row in enumerate(self._rows):
            if index in self._goes_on:
                whole[-1] += row
            else:
                whole.append(row)
        return [one.rstrip() for one in whole if one.strip()]

    def feed(self, text: str) -> None:
        """Take what was written; the beginning of a sequence waits for its end."""
        text = self._rest + text
        cut = re.search(r"\x1b(\[[0-9;?]*)?$", text)
        self._rest = text[cut.start() :] if cut else ""
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", text[: len(text) - len(self._rest)]):
            self._take(part)

    def _take(self, part: str) -> None:
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
            pass  # a colour
        else:
            assert part.isprintable(), repr(part)
            self._put(part)

    def _put(self, character: str) -> None:
        if self._column >= self.columns:
            if self._wraps:
                self._column = 0
                self._down()
                self._goes_on.add(self._row)
            else:
                self._column = self.columns - 1
        row = self._rows[self._row].ljust(self._column)
        self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        self._goes_on.discard(self._row)
        if self._row == len(self._rows):
            self._rows.append("")


def run_on_a_terminal(
    command: Sequence[str], columns: int, resized: Callable[[Screen], int | None] = lambda screen: None
) -> tuple[Screen, list[list[str]], str, int]:
    """Run ``command`` with a pseudo-terminal for its output.

    Args:
        command: what to run.
        columns: of the terminal.
        resized: asked after each piece of output; returns how many columns it has from then on, or None.

    Returns:
        the screen at the end, what stood on it after each piece of output, all that was written, and the exit code.
    """
    ours, theirs = pty.openpty()
    _set_size(theirs, columns)
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=variables | {"TERM": "xterm"})
    os.close(theirs)
    screen, frames, written, pending = Screen(columns), [], "", b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux's way to say that nobody holds the other end any more
            break
        if not part:
            break
        pending += part
        text = pending.decode(errors="ignore")
        pending = pending[len(text.encode()) :]
        written += text
        screen.feed(text)
        frames.append(screen.lines)
        now = resized(screen)
        if now is not None:
            screen.columns = now
            _set_size(ours, now)
    os.close(ours)
    return screen, frames, written, process.wait(timeout=60)


def _set_size(end: int, columns: int) -> None:
    """Either end will do."""
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
