"""Merges the results of the pieces into one page and one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cuda.outcome import write_json
from benchmarks.cuda.parts import ROOT, Piece, parts
from benchmarks.pages import put

PAGE, FILE = "report.md", "report.json"
NAME = "cuda"
"""Of the marks in docs/benchmarks/gpu.md."""


def path_of(folder: Path, piece: Piece) -> Path:
    return folder / "parts" / f"{piece.part}-{piece.name}.json"


def known(path: Path) -> dict[str, Any] | None:
    """Return the contents of the file; None if it does not exist or cannot be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def write(folder: Path, about: dict[str, Any], devices: int) -> str:
    """Write the page and the JSON file of everything run so far; returns the page's text."""
    merged: list[dict[str, Any]] = []
    lines = [conditions(about), ""]
    if about.get("rehearsed"):
        lines += ["A rehearsal on emulated devices: it shows that the code runs. Times and memory mean nothing.", ""]
    summary = ["| Part | ok | failed | not shown | not run | seconds |", "|---|---|---|---|---|---|"]
    sections = []
    for part in parts(devices):
        records = [known(path_of(folder, piece)) for piece in part.pieces]
        run = [record for record in records if record is not None]
        done = sum(record["status"] == "ok" for record in run)
        unseen = sum(record["status"] == "not shown here" for record in run)
        seconds = sum(record["seconds"] for record in run)
        counts = [done, len(run) - done - unseen, unseen, len(records) - len(run), round(seconds)]
        summary.append(f"| {part.title} (`{part.name}`) | {' | '.join(map(str, counts))} |")
        merged.append({"name": part.name, "title": part.title, "pieces": run})
        for piece, record in zip(part.pieces, records, strict=True):
            if record is None:
                merged[-1].setdefault("not_run", []).append(piece.name)
        sections += _section(part.title, run, about)
    text = "\n".join([*lines, *summary, *sections]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(f"# make cuda\n\n{text}")
    write_json(folder / FILE, {"about": about, "parts": merged})
    return text


def put_into_docs(text: str) -> None:
    """Put the report into docs/benchmarks/gpu.md, between its marks."""
    put(NAME, text.rstrip(), ROOT / "docs" / "benchmarks" / "gpu.md")


def conditions(about: dict[str, Any]) -> str:
    """Return device, driver, versions, commit and command, in a line or two."""
    names = [device["name"] for device in about["devices"]]
    each = {name: names.count(name) for name in names}
    devices = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in each.items())
    versions = [f"Python {about['python']}", f"torch {about['torch']}"]
    versions += [f"{label} {about[key]}" for key, label in _VERSIONS.items() if about.get(key)]
    versions += [f"{name} {number}" for name, number in about.get("packages", {}).items() if name == "deepspeed"]
    hosts = f"{about['processor']}, {about['cores']} cores"
    return f"{devices}; {hosts}; {', '.join(versions)}; commit {about['commit']}; `{about['command']}`."


_VERSIONS = {"cuda": "CUDA", "driver": "driver", "nccl": "NCCL", "cudnn": "cuDNN"}


def _section(title: str, records: list[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    if not records:
        return []
    lines = ["", f"### {title}", ""]
    columns = next((record["columns"] for record in records if record.get("columns")), None)
    if columns:
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(row)} |" for record in records for row in record.get("rows", [])]
        lines.append("")
    for record in records:
        said = [f"not shown here: {text}" for text in record.get("not_shown", [])] + record.get("notes", [])
        if record["status"] not in ("ok", "not shown here"):
            said.insert(0, f"**{record['status']}**: {_short(record['reason'])} (logs/{record['log']})")
        if record["commit"] != about["commit"]:
            said.append(f"of commit {record['commit']}, {record['date']}")
        lines += [f"- `{record['name']}`: {text}" for text in said]
    return lines


def _short(reason: str) -> str:
    words = " ".join(reason.split())
    return words if len(words) < 400 else f"... {words[-400:]}"
