"""``make parity``: runs the suite and prints the matrix of strategies and cases; ``--write`` puts it into the docs.

With ``-k`` only a part is run, and the rest stays in the docs unchanged: ``--write -k deepspeed``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"


class Matrix:
    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], str] = {}
        self.shows: dict[str, str] = {}
        self.columns: list[str] = []  # of the page, in its order

    def pytest_runtest_logreport(self, report: Any) -> None:
        told = dict(report.user_properties)
        if "row" not in told or (report.when != "call" and report.passed):
            return
        place = told["row"], told["column"]
        self.shows[told["row"]] = told["shows"]
        passed = told.get("cell", "equal") if report.passed else "DIFFERS" if report.failed else "skipped"
        # A row may stand for several tests, of several world sizes: all of them must pass.
        if self.cells.get(place) != "DIFFERS":
            self.cells[place] = passed

    def keep(self, page: str) -> None:
        """Copy results from a page for everything that was not run."""
        lines = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
        (_, *columns, _), *rows = (
            [cell.strip(" `") if number else cell for number, cell in enumerate(line)] for line in lines
        )
        self.columns = columns
        known: dict[tuple[str, str], str] = {}
        shows: dict[str, str] = {}
        for row, *cells, shown in rows:
            shows[row.strip()] = shown
            known |= {(row.strip(), column): cell for column, cell in zip(columns, cells, strict=True) if cell}
        self.cells, self.shows = {**known, **self.cells}, {**shows, **self.shows}

    def markdown(self) -> str:
        """Return the matrix: one line per case, one column per strategy."""
        columns = list(dict.fromkeys([*self.columns, *(column for _, column in self.cells)]))
        lines = [
            f"| Case | {' | '.join(f'`{column}`' for column in columns)} | Shows |",
            f"|---|{'---|' * len(columns)}---|",
        ]
        for row, shows in self.shows.items():
            cells = " | ".join(self.cells.get((row, column), "") for column in columns)
            lines.append(f"| {row} | {cells} | {shows} |")
        return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    write = "--write" in arguments
    matrix = Matrix()
    options = [argument for argument in arguments if argument != "--write"]
    code = int(pytest.main([str(HERE), "-q", "--no-header", "-p", "no:cacheprovider", *options], plugins=[matrix]))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    page, _, after = rest.partition(END)
    if write:
        matrix.keep(page)
    print()
    print(matrix.markdown())
    if write and code == 0:
        PAGE.write_text(before + BEGIN + "\n" + matrix.markdown() + "\n" + END + after)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
