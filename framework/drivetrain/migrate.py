"""``python -m drivetrain.migrate FILE...``: a script written for Lightning, in the names of drivetrain.

It changes names and nothing else, runs nothing of the file, and lists what is left to do by line.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

from drivetrain._config.lightning_names import of_strategies, of_trainers
from drivetrain._config.old_names import new_name

_LIGHTNING = re.compile(r"(lightning|lightning\.pytorch|pytorch_lightning)(\.|$)")
_CLASSES = {
    "LightningModule": "TrainModule",
    "LightningDataModule": "DataModule",
    "Trainer": "Fit",
    "ModelCheckpoint": "Checkpoint",
    "TQDMProgressBar": "ProgressBar",
    "RichModelSummary": "ModelSummary",
}
_PLACES = (
    "drivetrain",
    "drivetrain.callbacks",
    "drivetrain.loggers",
    "drivetrain.profilers",
    "drivetrain.tuner",
    "drivetrain.data",
    "drivetrain.environments",
)
_STRATEGIES = ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy")
_REMARKS = {
    "plugins": "plugins= has no counterpart: pass environment=, precision= or strategy=",
    "weights_only": "weights_only= is not needed: a checkpoint holds no pickle",
    "retain_graph": "retain_graph= is refused: add the losses, and call manual_backward once",
}


@cache
def _homes() -> dict[str, str]:
    """Where to import each name from; of the modules that are there, so that none is told that is not."""
    found = dict.fromkeys(_STRATEGIES, "drivetrain_strategies")
    for place in _PLACES:
        for name in import_module(place).__all__:
            found.setdefault(name, place)
    return found


@dataclass(slots=True)
class Migrated:
    """What became of a file.

    Attributes:
        source: its new text.
        left: what is left to do, with the lines of the text as it was.
    """

    source: str
    left: list[tuple[int, str]] = field(default_factory=list)


def migrate(source: str) -> Migrated:
    """Return a script in the names of drivetrain; one that imports nothing of Lightning comes back as it was.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    names, packages = _imported(tree)
    if not names and not packages:
        return Migrated(source)
    edits: dict[
        tuple[int, int], tuple[int, str]
    ] = {}  # by line and column in bytes: where it ends, and what stands there
    statements: dict[int, tuple[int, str]] = {}  # whole statements: by first line, the last, and what stands for them
    left: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _import(node, lines, statements, left)
        elif isinstance(node, ast.Name) and node.id in names and names[node.id] != node.id:
            edits[node.lineno, node.col_offset] = node.col_offset + len(node.id.encode()), names[node.id]
        elif isinstance(node, ast.Attribute):
            _attribute(node, packages, edits, left)
        elif isinstance(node, ast.Call):
            left += _arguments(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            left += _definitions(node)
    return Migrated(_edited(lines, edits, statements), sorted(set(left)))


def _imported(tree: ast.AST) -> tuple[dict[str, str], set[str]]:
    """Names that came from Lightning with their new ones, and the names under which its packages are there."""
    names: dict[str, str] = {}
    packages: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _LIGHTNING.match(node.module or ""):
            for one in node.names:
                if one.name == "pytorch":
                    packages.add(one.asname or one.name)
                elif one.asname is None:
                    names[one.name] = _CLASSES.get(one.name, one.name)
        elif isinstance(node, ast.Import):
            packages |= {one.asname or one.name for one in node.names if _LIGHTNING.match(one.name)}
    return names, packages


def _import(
    node: ast.Import | ast.ImportFrom,
    lines: Sequence[str],
    statements: dict[int, tuple[int, str]],
    left: list[tuple[int, str]],
) -> None:
    indent = re.match(r"\s*", lines[node.lineno - 1])
    space = "" if indent is None else indent[0]
    new: list[str] = []
    if isinstance(node, ast.Import):
        if not any(_LIGHTNING.match(one.name) for one in node.names):
            return
        for one in node.names:
            if not _LIGHTNING.match(one.name):
                new.append(f"import {one.name}" + (f" as {one.asname}" if one.asname else ""))
            elif one.name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
                new.append("import drivetrain" + (f" as {one.asname}" if one.asname else ""))
            else:
                left.append((node.lineno, f"import {one.name}: import what it is used for from drivetrain"))
                new.append(f"import {one.name}" + (f" as {one.asname}" if one.asname else ""))
    elif not _LIGHTNING.match(node.module or ""):
        return
    else:
        homes: dict[str, list[str]] = {}
        for one in node.names:
            name = _CLASSES.get(one.name, one.name)
            if one.name == "pytorch":
                new.append(f"import drivetrain as {one.asname or one.name}")
                continue
            home = _homes().get(name)
            if home is None:
                left.append((node.lineno, f"{one.name} of {node.module} has no counterpart that is known here"))
                home = node.module or ""
            homes.setdefault(home, []).append(name + (f" as {one.asname}" if one.asname else ""))
        new += [f"from {home} import {', '.join(found)}" for home, found in homes.items()]
    assert node.end_lineno is not None
    statements[node.lineno] = node.end_lineno, "".join(f"{space}{one}\n" for one in new)


def _attribute(
    node: ast.Attribute, packages: set[str], edits: dict[tuple[int, int], tuple[int, str]], left: list[tuple[int, str]]
) -> None:
    owner = ast.unparse(node.value)
    if owner in packages:
        name = _CLASSES.get(node.attr, node.attr)
        home = _homes().get(name)
        if home is None and node.attr not in ("callbacks", "loggers", "pytorch"):
            left.append((node.lineno, f"{owner}.{node.attr} has no counterpart that is known here"))
        elif home not in (None, "drivetrain"):
            left.append((node.lineno, f"{owner}.{node.attr}: write `from {home} import {name}`"))
    elif any(owner.startswith(f"{package}.") for package in packages):
        name = _CLASSES.get(node.attr, node.attr)
        place = f"drivetrain.{owner.rpartition('.')[2]}"
        if _homes().get(name) != place:
            left.append((node.lineno, f"{owner}.{node.attr} has no counterpart in {place}"))
    else:
        for end, text in (("trainer", of_trainers), ("trainer.strategy", of_strategies)):
            if owner == end or owner.endswith(f".{end}"):
                _, there, way = text(end, node.attr).partition(": ")
                if there:
                    left.append((node.lineno, f"{owner}.{node.attr}: {way.rstrip('.')}"))
        return
    assert node.end_col_offset is not None
    assert node.end_lineno is not None
    if name != node.attr:
        start = node.end_col_offset - len(node.attr.encode())
        edits[node.end_lineno, start] = node.end_col_offset, name
    root = node.value
    if owner in packages and owner in ("lightning", "lightning.pytorch", "pytorch_lightning"):  # it is written out
        edits[root.lineno, root.col_offset] = root.end_col_offset or 0, "drivetrain"


def _arguments(node: ast.Call) -> Iterator[tuple[int, str]]:
    called = ast.unparse(node.func).rpartition(".")[2]
    for keyword in node.keywords:
        name = keyword.arg
        if name is None:
            continue
        way = new_name(name) if called == "Trainer" else None
        if name in _REMARKS and called in ("Trainer", "fit", "validate", "test", "predict", "manual_backward"):
            way = _REMARKS[name]
        if way is not None:
            yield keyword.value.lineno, f"{name}=: {way}"
    if called == "Trainer" and node.args:
        yield node.lineno, "Trainer(...) has positional arguments: Fit takes keywords"
    if called == "log" and len(node.args) > 2:
        yield node.lineno, "log(...) has positional options: write them by name, as prog_bar=True"


def _definitions(node: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
        gone = {"training_epoch_end", "validation_epoch_end", "test_epoch_end", "optimizer_zero_grad", "backward"}
        if node.name in gone or re.fullmatch(r"on_\w+_model_(eval|train|zero_grad)", node.name):
            yield node.lineno, f"def {node.name}: nobody calls it; the error of the first run says what to write"
        if "dataloader_iter" in {one.arg for one in node.args.args}:
            yield node.lineno, f"def {node.name}: it gets a batch, and no dataloader_iter"


def _edited(
    lines: Sequence[str], edits: dict[tuple[int, int], tuple[int, str]], statements: dict[int, tuple[int, str]]
) -> str:
    changed = list(lines)
    for (line, start), (end, text) in sorted(edits.items(), reverse=True):
        plain = changed[line - 1].encode()
        changed[line - 1] = (plain[:start] + text.encode() + plain[end:]).decode()
    for first, (last, text) in sorted(statements.items(), reverse=True):
        changed[first - 1 : last] = [text]
    return "".join(changed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Migrate the files that are named; returns 1 where one cannot be read, else 0."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.migrate", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Python files written for Lightning")
    parser.add_argument("--write", action="store_true", help="change the files; else the difference is printed")
    given = parser.parse_args(arguments)
    failed = 0
    for path in given.files:
        try:
            source = path.read_text(encoding="utf-8")
            migrated = migrate(source)
        except (OSError, ValueError, SyntaxError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = 1
            continue
        if given.write and migrated.source != source:
            path.write_text(migrated.source, encoding="utf-8")
        elif not given.write:
            before, after = source.splitlines(keepends=True), migrated.source.splitlines(keepends=True)
            sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))
        for line, text in migrated.left:
            print(f"{path}:{line}: {text}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
