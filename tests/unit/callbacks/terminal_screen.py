"""A terminal emulator: computes what is on the screen after the text that a program has written."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import termios


class Screen:
    """Interprets what a progress bar writes, as xterm, which does not wrap lines again after a resize."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._rows: list[str] = [""]
        self._row = self._column = 0
        self._wraps = True
        self._continuation_rows: set[int] = set()  # rows that continue the previous one

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
        """Process output."""
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]|\x1b", text):
            self._process(part)

    def _process(self, part: str) -> None:
        if part == "\r":
            self._column = 0
        elif part == "\n":
            self._column = 0
            self._down()
        elif part in ("\x1b[K", "\x1b[J"):
            self._rows[self._row] = self._rows[self._row][: self._column]
            if part == "\x1b[J":
                del self._rows[self._row + 1 :]
        elif re.fullmatch(r"\x1b\[\d*A", part):
            self._row -= int(part[2:-1] or 1)
            assert self._row >= 0
        elif part in ("\x1b[?7l", "\x1b[?7h"):
            self._wraps = part[-1] == "h"
        elif not re.fullmatch(r"\x1b\[[\d;]*m", part):  # a color
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


class Terminal(io.StringIO):
    """A text stream that is a terminal. ``frames`` are the lines on its screen after each write."""

    def __init__(self, columns: int = 100) -> None:
        super().__init__()
        self.screen = Screen(columns)
        self.frames: list[list[str]] = []
        self._descriptors = os.openpty()  # has the size
        self.resize(columns)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptors[1]

    def write(self, text: str) -> int:
        self.screen.feed(text)
        self.frames.append(self.screen.lines)
        return super().write(text)

    def resize(self, columns: int) -> None:
        self.screen.columns = columns
        fcntl.ioctl(self.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))

    def close(self) -> None:
        if not self.closed:
            for descriptor in self._descriptors:
                os.close(descriptor)
        super().close()
