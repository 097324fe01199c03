"""The result of a piece, as it is passed from the process that ran it into the report."""

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
    """Rows of the part's table, and further information.

    Attributes:
        columns: of the part's table, the same for all of its pieces.
        rows: cells as text.
        figures: the numbers behind the cells, by name.
        failures: checks that failed; the piece has failed if there are any.
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
    """Write atomically: a process that is killed midway leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")
    os.replace(draft, path)


def _finite(value: Any) -> Any:
    """Replace non-finite numbers by text, since JSON has no form for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
