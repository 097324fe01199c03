"""What a piece found, as it goes from the process that ran it into the report."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, NOT_SHOWN, LACKING = "ok", "failed", "not shown here", "a package is missing"
ENDED = {OK, FAILED, NOT_SHOWN, LACKING, "crashed", "out of time"}
"""How a piece that has begun may have come out."""


@dataclass
class Outcome:
    """Rows of the part's table, and what is to be said besides.

    Attributes:
        columns: of the part's table, the same for all of its pieces.
        rows: cells as text.
        figures: the numbers that they were made from, by name.
        failures: what did not hold; the piece has failed where there is any.
        not_shown: what could not be shown on this machine, and why.
        notes: further lines.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    not_shown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        if self.failures:
            return FAILED
        return NOT_SHOWN if self.not_shown else OK

    def record(self) -> dict[str, Any]:
        return {"status": self.status, "reason": "\n".join(self.failures), **asdict(self)}


def write_json(path: Path, value: Any) -> None:
    """All of it or nothing: who is ended midway leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")
    os.replace(draft, path)


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a number: it stands there as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
