"""A model's summary, formatted as aligned columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.callbacks._forward_shapes import Shapes

_COLUMN_GAP = "  "
_MIN_WIDTH = 8  # characters to which a column may be shortened
_MAX_NAMES = 4  # names of rows in a note; further rows are only counted
_NOTES = {"meta": "on the meta device", "lazy": "lazy, without a shape until the first batch"}


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """The row of one submodule, whose numbers include those of the submodule's children.

    A parameter that is shared within a row is counted once. A parameter that is shared between rows is counted in each
    row, but only once in the total.
    """

    name: str
    type_name: str
    depth: int
    total: int
    trainable: int
    size: int
    """Bytes of parameters and buffers."""
    notes: str
    training: bool
    """Whether the submodule itself is in train mode."""
    inputs: Shapes | None = None
    """Shapes of the tensors that the submodule is called with; None if they are unknown or there is no call."""
    outputs: Shapes | None = None
    """Shapes of the tensors that the submodule returns; None if they are unknown or there is no call."""
    flops: int | None = None
    """FLOPs of the submodule in a forward pass of the example; None if they are unknown."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The rows of a module's children and the module's totals."""

    rows: tuple[SummaryRow, ...]
    total: int
    trainable: int
    size: int
    """Bytes of parameters and buffers."""
    in_train_mode: int
    """Number of modules in train mode, at any depth."""
    in_eval_mode: int
    """Number of modules in eval mode, at any depth."""
    flops: int | None = None
    """FLOPs of a forward pass of the example; None without an example or if they cannot be counted."""
    missing_reason: str = ""
    """Why FLOPs cannot be counted; "" if they are counted."""

    def __str__(self) -> str:
        return as_text(self)


@dataclass(slots=True)
class _Column:
    """One column of the table.

    Attributes:
        title: the header.
        cells: the text of each row.
        right: whether to align right.
        shrinks: whether the column may be shortened.
    """

    title: str
    cells: list[str]
    right: bool = False
    shrinks: bool = False

    @property
    def width(self) -> int:
        return max(map(len, [self.title, *self.cells]))

    def shorten(self) -> None:
        """Shorten the cells so that the column becomes one character narrower."""
        width = self.width - 1
        self.cells = [truncate_middle(cell, width) for cell in self.cells]


def as_text(summary: Summary, width: int = 80) -> str:
    """Return the summary as aligned columns, with at most ``width`` characters per line."""
    lines: list[str] = []
    if summary.rows:
        columns = _columns(summary, width)
        widths = [column.width for column in columns]
        table = [
            _COLUMN_GAP.join(
                cell.rjust(column_width) if column.right else cell.ljust(column_width)
                for column, cell, column_width in zip(columns, cells, widths, strict=True)
            ).rstrip()
            for cells in zip(*([column.title, *column.cells] for column in columns), strict=True)
        ]
        rule = "-" * _table_width(columns)
        lines = [table[0], rule, *table[1:], rule]
    return "\n".join(lines + [part for line in _footer(summary) for part in textwrap.wrap(line, width)])


def _columns(summary: Summary, width: int) -> list[_Column]:
    """Return the columns, shortened to fit into ``width`` characters if possible."""
    rows = summary.rows
    columns = [
        _Column("Name", ["  " * row.depth + row.name.rpartition(".")[2] for row in rows], shrinks=True),
        _Column("Type", [row.type_name for row in rows], shrinks=True),
        _Column("Params", [format_count(row.total) for row in rows], right=True),
        _Column("Size", [format_bytes(row.size) for row in rows], right=True),
    ]
    if summary.flops is not None:
        columns.append(_Column("In", [_shapes(row.inputs) for row in rows], shrinks=True))
        columns.append(_Column("Out", [_shapes(row.outputs) for row in rows], shrinks=True))
        columns.append(
            _Column("FLOPs", [format_count(row.flops, "KMGTP") if row.flops else "-" for row in rows], right=True)
        )
    modes = [_mode(row) for row in rows]
    if set(modes) != {"train"}:
        columns.append(_Column("Mode", modes))
    while _table_width(columns) > width:
        shrinkable = [column for column in columns if column.shrinks and column.width > _MIN_WIDTH]
        if not shrinkable:
            break  # The terminal is too narrow for the table, and will wrap lines.
        max(shrinkable, key=lambda column: column.width).shorten()
    return columns


def _table_width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(_COLUMN_GAP) * (len(columns) - 1)


def _mode(row: SummaryRow) -> str:
    frozen = "" if row.trainable == row.total else "part frozen" if row.trainable else "frozen"
    return ", ".join(filter(None, [frozen, "" if row.training else "eval"])) or "train"


def _footer(summary: Summary) -> list[str]:
    frozen, modules = summary.total - summary.trainable, summary.in_train_mode + summary.in_eval_mode
    modes = f"{summary.in_train_mode} of them in train mode, {summary.in_eval_mode} in eval mode"
    if not summary.in_eval_mode or not summary.in_train_mode:
        modes = f"all in {'train' if summary.in_train_mode else 'eval'} mode"
    lines = [
        *_notes(summary.rows),
        f"{summary.total:,} parameters, {summary.trainable:,} trainable, {frozen:,} frozen; "
        f"{format_bytes(summary.size)} with buffers",
        f"{modules} module{'s' * (modules > 1)}, {modes}",
    ]
    if summary.flops is not None:
        lines.append(f"{_with_unit(summary.flops, 'KMGTP', 'FLOPs')} in a forward pass of example_input_array")
    elif summary.missing_reason:
        lines.append(f"No shapes and no FLOPs: {summary.missing_reason}")
    return lines


def _notes(rows: Sequence[SummaryRow]) -> list[str]:
    """Return the notes below the table, each with the names of the rows that the note is about."""
    by_note: dict[str, list[str]] = {}
    for row in rows:
        for note in filter(None, row.notes.split("; ")):
            by_note.setdefault(note, []).append(row.name)
    lines = []
    for note, names in by_note.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        lines.append(f"{', '.join(names[:_MAX_NAMES])}{more}: {_NOTES.get(note, note)}")
    return lines


def _shapes(shapes: Sequence[Sequence[int]] | None) -> str:
    if not shapes:
        return "-"
    first = "x".join(map(str, shapes[0])) or "()"
    return f"{first} +{len(shapes) - 1}" if len(shapes) > 1 else first


def truncate_middle(text: str, width: int) -> str:
    """Return ``text``, with its middle replaced by ".." if it is longer than ``width``."""
    if len(text) <= width:
        return text
    tail = (width - 2) // 2
    return text[: width - 2 - tail] + ".." + text[len(text) - tail :]


def format_count(number: float, units: str = "KMBT") -> str:
    """Format a number with three significant digits and a unit, such as ``"820"`` or ``"1.23 M"``."""
    if number < 1000:
        return f"{number:.0f}"
    for unit in units:
        number /= 1000
        if number < 999.5 or unit == units[-1]:
            break
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:,.{digits}f} {unit}"


def format_bytes(size: int) -> str:
    """Format a number of bytes with a decimal prefix, such as ``"820 B"`` or ``"1.23 MB"``."""
    return _with_unit(size, "kMGTP", "B")


def _with_unit(number: int, units: str, unit: str) -> str:
    text = format_count(number, units)
    return f"{text}{unit}" if number >= 1000 else f"{text} {unit}"
