"""The text of a table of numbers, as any spreadsheet opens it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

Row = dict[str, str]

_QUOTE = '"'
_NEEDS_QUOTES = re.compile(r'[,"\r\n]')
_BREAKS = re.compile(r'["\r\n]')
_END = "end\n"


def table_of(text: str) -> tuple[list[str], list[Row]]:
    """Return a table's columns and its rows; cells that are empty are left out.

    What comes after the last line break was torn by a kill, and is left out. So is a last row that ends within quotes.
    """
    # A row of our own comes last, and goes again: where a field before it was left open, that row goes with it.
    text = text[: text.rfind("\n") + 1] + _END
    *records, _ = csv.reader(io.StringIO(text))
    columns, *rows = records or [[]]
    return list(dict.fromkeys(columns)), [
        {column: cell for column, cell in zip(columns, row, strict=False) if cell} for row in rows if row
    ]


def text_of(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the text of a whole table."""
    return _line(columns) + lines_of(columns, rows)


def lines_of(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the lines of rows, without the names of the columns."""
    return "".join(_line([row.get(column, "") for column in columns]) for row in rows)


def _line(cells: Sequence[str]) -> str:
    # The csv module leaves a carriage return without quotes, and takes it for the end of a line.
    line = ",".join(cells)
    if line.count(",") >= len(cells) or _BREAKS.search(line):
        line = ",".join(
            f'"{cell.replace(_QUOTE, _QUOTE * 2)}"' if _NEEDS_QUOTES.search(cell) else cell for cell in cells
        )
    return line + "\n"
