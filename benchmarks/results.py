"""Writes docs/benchmarks.md: for each question a picture and a small table, taken from the long tables next to it.

Usage: python -m benchmarks.results
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import fill

from benchmarks.bars import Bar, drawn

DOCS = Path(__file__).parents[1] / "docs"

HEAD = """# Benchmarks

The benchmarks compare the engine with a hand-written loop. For each question, this page has a picture or a small
table, and a separate page has every figure, the machine, the versions and the command. `make bench` repeats the
measurements. `python -m benchmarks.results` generates this page from the detailed tables, and a test checks that this
page is up to date.
"""

METHOD = """## How it is measured

The speed of a machine varies over time. Loops are therefore interleaved (A B A B) and compared round by round. Each
loop runs twice, with different numbers of steps; the slope between the two times contains no start-up time. Loops of
several processes [alternate within one run](decisions/0017-loops-of-a-strategy-take-turns.md). All loops of a table
train the same network on the same data in the same order. The benchmark fails if the final weights are not
bit-identical.
Figures are medians. *Processor time* does not include the time that a loop waits on a shared machine.
Counts of Python calls, instructions, collectives and bytes are the same in every run.
"""

Row = dict[str, str]


def page(docs: Path) -> tuple[str, dict[str, str]]:
    """Return the page, and each picture's text by its file name, from the long tables below ``docs``."""
    pictures: dict[str, str] = {}
    sections = [make(docs / "benchmarks", pictures) for make in QUESTIONS]
    return "\n".join([HEAD, *sections, METHOD]), pictures


def write(docs: Path = DOCS) -> None:
    """Write the page and its pictures."""
    text, pictures = page(docs)
    (docs / "benchmarks.md").write_text(text)
    for name, picture in pictures.items():
        (docs / "images" / name).write_text(picture)


def _step(folder: Path, pictures: dict[str, str]) -> str:
    rows = _rows(folder / "one-process.md", "Python calls over raw")
    ways = ("bare", "one value", "five values", "typical")
    added = {(row["1"], row["0"]): _first(row["over raw, us"]) for row in rows}
    calls = {(row["1"], row["0"]): row["Python calls over raw"] for row in rows}
    frameworks = list(dict.fromkeys(row["1"] for row in rows if row["0"]))
    frameworks.sort(key=lambda name: added.get((name, "bare"), 0.0))
    bars = [Bar(_plain(name), {"added": max(added[name, "typical"], 0.0)}) for name in frameworks]
    pictures["benchmark-step.svg"] = drawn("Microseconds that a framework adds to a typical step", bars, ["added"])
    lines = [
        [name, *(f"{added[name, way]:.0f}" for way in ways), calls[name, "bare"], calls[name, "typical"]]
        for name in frameworks
    ]
    return _section(
        "What does a step cost in one process?",
        "one-process.md",
        "The table shows the microseconds, and the Python calls, by which a step exceeds that of a hand-written loop, "
        "on a network of nine weights. A *bare* step logs nothing. Other steps log one or five values. A *typical* "
        "step has a progress bar, a CSV logger and a checkpoint callback. Counts of Python calls do not depend on the "
        "machine. Differences of a few microseconds are noise.",
        "![Bars: microseconds that each framework adds to a typical step](images/benchmark-step.svg)",
        _table(["us over a loop by hand", *ways, "calls, bare", "calls, typical"], lines),
    )


def _instructions(folder: Path, pictures: Mapping[str, str]) -> str:
    rows = _rows(folder / "instructions.md", "over raw")
    linear = [row for row in rows if row["0"] == "linear" and row["1"] in ("bare", "five values")]
    lines = [[f"{row['2']}, {row['1']}", row["over raw"], row["ratio"]] for row in linear]
    ranks = [
        [row["a rank's step"], row["over"], row["ratio"]] for row in _rows(folder / "instructions.md", "a rank's step")
    ]
    return _section(
        "How many instructions does a step take?",
        "instructions.md",
        "Valgrind counts the instructions. The tables show by how many thousand a step exceeds that of a hand-written "
        "loop, and the ratio of the two counts. The first table is for the network `linear` in one process. The "
        "second is for a rank that trains a small GPT, compared with a hand-written loop that uses the same strategy.",
        _table(["a step of `linear`", "over raw", "ratio"], lines),
        _table(["a rank's step", "over by hand", "ratio"], ranks),
    )


def _profile(folder: Path, pictures: Mapping[str, str]) -> str:
    return _section(
        "Where does a step spend its time?",
        "where-a-step-goes.md",
        "The picture shows the time of each part of a step, for the hand-written loop, drivetrain and Lightning.",
        "![Bars: where a step of the network linear goes](images/step-linear.svg)",
    )


def _strategies(folder: Path, pictures: dict[str, str]) -> str:
    rows = _rows(folder / "two-processes.md", "Strategy")
    by_hand = {row["Strategy"]: row for row in rows if row["Loop"] == "by hand"}
    engine = {row["Strategy"]: row for row in rows if row["Loop"] == "engine"}
    bars = [
        Bar(f"{_plain(name)}{which}", {"ms a step": _first(row["ms a step"])})
        for name in engine
        for which, row in ((", by hand", by_hand[name]), ("", engine[name]))
    ]
    pictures["benchmark-strategies.svg"] = drawn(
        "Milliseconds of a step on two processes", bars, ["ms a step"], left=240
    )
    lines = [
        [name, f"{_first(row['ratio']):.3f}", f"{_first(row['ratio, 2']):.3f}", row["collectives"], row["KiB sent"]]
        for name, row in engine.items()
    ]
    return _section(
        "What does a step cost on two processes?",
        "two-processes.md",
        "A small GPT trains under each strategy and is compared with hand-written loops that use "
        "`DistributedDataParallel`, `fully_shard` and `deepspeed.initialize`. Collectives and KiB sent are counted "
        "per step and rank.",
        "![Bars: a step by hand and by the engine, for each strategy](images/benchmark-strategies.svg)",
        _table(["Strategy", "ratio", "in processor time", "collectives", "KiB sent"], lines),
    )


def _start(folder: Path, pictures: dict[str, str]) -> str:
    rows = [row for row in _rows(folder / "starting.md", "Begun") if row["Begun"] != "by hand"]
    parts = ("import", "construct", "first step")
    bars = [Bar(row["Begun"], {part: _first(row[part]) for part in parts}) for row in rows]
    pictures["benchmark-start.svg"] = drawn("Milliseconds until the first step is done", bars, parts)
    lines = [[row["Begun"], *(f"{_first(row[part]):.1f}" for part in parts), row["modules"]] for row in rows]
    return _section(
        "How long does it take to start?",
        "starting.md",
        "Times are in milliseconds, in a process that has already imported torch.",
        "![Bars: import, construction and first step](images/benchmark-start.svg)",
        _table(["", *parts, "modules imported"], lines),
    )


def _data(folder: Path, pictures: Mapping[str, str]) -> str:
    rows = _rows(folder / "reading-data.md", "Samples")
    lines = [
        [row["Samples"], row["Order"], f"{_first(row['first batch, ms']):.1f}", row["memory, MiB"]]
        for row in rows
        if row["Samples"] in ("100,000", "10,000,000", "1,000,000,000")
    ]
    return _section(
        "How long does a shuffled epoch take to start?",
        "reading-data.md",
        "The table shows the time to the first batch and the growth in memory. Resuming in the middle of an epoch "
        "takes the same time.",
        _table(["samples", "order", "first batch, ms", "memory, MiB"], lines),
    )


def _scale(folder: Path, pictures: Mapping[str, str]) -> str:
    lines = [
        [row["Ranks"], row["calls over"], f"{_first(row['over, us']):.0f}", f"{_first(row['over, ms']):.1f}"]
        for row in _rows(folder / "many-ranks.md", "Ranks")
    ]
    return _section(
        "What is the overhead on many ranks?",
        "many-ranks.md",
        "The table shows the overhead of one rank among many, per step and at the start of a run, compared with "
        "hand-written DDP. The other ranks are simulated by torch's fake process group.",
        _table(["ranks", "Python calls a step", "us a step", "ms at the start"], lines),
    )


def _checkpoints(folder: Path, pictures: dict[str, str]) -> str:
    rows = _rows(folder / "saving-and-loading.md", "memory of a save, MB")
    parts = ("save, ms", "load, ms")
    bars = [Bar(_plain(row["0"]), {part: _first(row[part]) for part in parts}) for row in rows]
    title = "Milliseconds to save and to load 1,206 MB of weights and optimizer state"
    pictures["benchmark-checkpoints.svg"] = drawn(title, bars, parts, left=220)
    lines = [
        [
            row["0"],
            *(f"{_first(row[part]):,.0f}" for part in parts),
            row["memory of a save, MB"],
            row["syncs"],
            row["checks"],
        ]
        for row in rows
    ]
    return _section(
        "How fast are checkpoints?",
        "saving-and-loading.md",
        "Each library saves and loads a GPT of 100 million parameters with the state of AdamW. A save that *syncs* "
        "survives a power cut, and a load that *checks* detects a flipped bit.",
        "![Bars: saving and loading, for each library](images/benchmark-checkpoints.svg)",
        _table(["", *parts, "memory of a save, MB", "syncs", "checks"], lines),
    )


def _gpu(folder: Path, pictures: Mapping[str, str]) -> str:
    return _section(
        "GPU",
        "gpu.md",
        "[`make cuda`](cuda.md) measures the overhead on a GPU. The detailed page has the report of a run on an H100.",
    )


QUESTIONS: tuple[Callable[[Path, dict[str, str]], str], ...] = (
    _step,
    _instructions,
    _profile,
    _strategies,
    _start,
    _data,
    _scale,
    _checkpoints,
    _gpu,
)


def _section(question: str, long: str, *parts: str) -> str:
    written = [part if part[0] in "|!" else fill(part, 118) for part in parts]
    return "\n\n".join([f"## {question}", *written, f"[Every figure](benchmarks/{long})"]) + "\n"


def _rows(path: Path, column: str) -> list[Row]:
    """Return the rows of a page's first table that has the given column, each as a mapping from columns to cells.

    A column without a name is keyed by its number, and the second column of a name by the name and ", 2".
    """
    for lines in _blocks(path.read_text().splitlines()):
        names: list[str] = []
        for number, cell in enumerate(_cells(lines[0])):
            name = cell or str(number)
            names.append(f"{name}, 2" if name in names else name)
        if column in names:
            return [dict(zip(names, _cells(line), strict=False)) for line in lines[2:]]
    raise ValueError(f"{path} has no table with a column {column!r}")


def _blocks(lines: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            yield block
            block = []


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _first(cell: str) -> float:
    """Return the median of ``median (minimum to maximum)``; 0 for an empty cell or text."""
    found = re.match(r"-?[\d,]+(\.\d+)?", cell)
    return float(found[0].replace(",", "")) if found else 0.0


def _plain(name: str) -> str:
    return name.replace("*", "").replace("`", "")


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    write()
