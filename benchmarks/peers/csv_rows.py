"""A CSV file, as users write one for frameworks without a CSV logger."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CSVRows:
    """Appends rows of values; they reach the file when it is closed or its buffer is full."""

    def __init__(self, folder: str, names: list[str]) -> None:
        self._file = (Path(folder) / "metrics.csv").open("w", newline="")
        self._writer = csv.DictWriter(self._file, ["step", *names])
        self._writer.writeheader()

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        self._writer.writerow({"step": step} | {name: float(value) for name, value in values.items()})

    def close(self) -> None:
        self._file.close()
