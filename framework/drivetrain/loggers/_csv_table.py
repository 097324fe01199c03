"""Parse and format CSV tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

Row = dict[str, str]

_SENTINEL = "end\n"


def parse_table(text: str) -> tuple[list[str], list[Row]]:
    """Return a table's columns, and the table's rows without empty cells.

    Text after the last line break, and a last row that ends within quotes, were truncated by a kill and are ignored.
    """
    # The last parsed row is dropped. It is the sentinel alone or, if the row before the sentinel has an unclosed quote,
    # this row and the sentinel.
    text = text[: text.rfind("\n") + 1] + _SENTINEL
    *records, _ = csv.reader(io.StringIO(text))
    columns, *rows = records or [[]]
    return list(dict.fromkeys(columns)), [
        {column: cell for column, cell in zip(columns, row, strict=False) if cell} for row in rows if row
    ]


def format_table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the text of a table with a header row."""
    return _format_row(columns) + format_rows(columns, rows)


def format_rows(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return the text of rows without a header row."""
    return "".join(_format_row([row.get(column, "") for column in columns]) for row in rows)


def _format_row(cells: Sequence[str]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\r\n").writerow(cells)  # quotes cells that contain a character of "\r\n"
    return f"{stream.getvalue()[:-2]}\n"
