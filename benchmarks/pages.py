"""Puts what was measured into the documentation."""

from __future__ import annotations

from pathlib import Path


def put(name: str, text: str, page: Path) -> None:
    """Put a table into a page, between its marks."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
