"""Writes results into the documentation."""

from __future__ import annotations

from pathlib import Path


def put(name: str, text: str, page: Path) -> None:
    """Replace the text between a page's markers of ``name``."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")
