"""``python -m drivetrain.migrate FILE...``: a script written for Lightning, in the names of drivetrain.

It changes names and nothing else, runs nothing of the file, and lists what is left to do by line.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import re
import shutil
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from drivetrain._config.lightning_names import strategy_attribute_error, trainer_attribute_error
from drivetrain._config.old_names import find_replacement

_LIGHTNING = re.compile(r"(lightning|lightning\.pytorch|pytorch_lightning)(\.|$)")
_STRING = re.compile(r"(lightning|pytorch_lightning)(\.\w+)+")  # what mock.patch and import_module get
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
_MODULES = ("self", "module", "pl_module", "model")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # Python's lines: str.splitlines knows more ends

Edits: TypeAlias = dict[tuple[int, int], tuple[tuple[int, int], str, str]]
"""By line and column in bytes: where it ends, what stands there ("" is anything), and what shall."""


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


@dataclass(slots=True)
class _Names:
    """What a file calls Lightning's things.

    Attributes:
        classes: for each name that an import binds, Lightning's name.
        kept: those of them that stay, as the file has another thing by the old name or the new one: they are imported
            with ``as``.
        packages: for each name that stands for a module of Lightning, or ``lightning`` itself, the module.
        others: nodes that are arguments, or loop variables, which only look like a package.
    """

    classes: dict[str, str] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)

    def new(self, name: str) -> str:
        """What the file calls it afterwards."""
        old = self.classes.get(name)
        return name if old != name or name in self.kept else _CLASSES.get(name, name)

    def path(self, node: ast.expr) -> list[str] | None:
        """The path in Lightning that an expression such as ``pl.callbacks.Timer`` names, else None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.packages or id(node) in self.others:
            return None
        return _inner(self.packages[node.id].split(".") + parts[::-1])

    def class_of(self, node: ast.expr) -> str:
        """Lightning's name of the class that an expression names, else nothing."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id, "")
        path = self.path(node)
        return path[-1] if path else ""


def _inner(path: list[str]) -> list[str]:
    """A path without the name of the package that it begins with."""
    return path[2:] if path[:2] == ["lightning", "pytorch"] else path[1:]


def migrate(source: str) -> Migrated:
    """Return a script in the names of drivetrain; one that imports nothing of Lightning comes back as it was.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    lines = [line.encode() for line in _LINE.findall(source)]
    left: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _STRING.fullmatch(node.value):
            left.append((node.lineno, f"{node.value!r} is a name of Lightning's in a string"))
    names = _imported(tree)
    if not names.classes and not names.packages:
        return Migrated(source, sorted(set(left)))
    edits: Edits = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _import(node, lines, names, edits, left)
        elif isinstance(node, ast.Name) and names.new(node.id) != node.id:
            _edit(edits, node, len(node.id.encode()), node.id, names.new(node.id))
        elif isinstance(node, ast.Attribute):
            _attribute(node, names, edits, left)
        elif isinstance(node, ast.Call):
            left += _arguments(node, names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            left += _definitions(node)
        for text in _annotations(node):
            _annotation(text, lines, names, edits, left)
    changed = _edited(lines, edits, left)
    try:
        ast.parse(changed)
    except SyntaxError:  # what it cannot do it leaves, and says so
        return Migrated(source, [(1, "the file is left as it was: change it by hand")])
    return Migrated(changed, sorted(set(left)))


# What is Lightning's


def _imported(tree: ast.AST) -> _Names:
    names = _Names()
    ours: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_of_lightning(node):
            for one in node.names:
                ours.add(id(one))
                path = _inner([*str(node.module).split("."), one.name])
                if not path or (len(path) == 1 and _is_module(one.name)):
                    names.packages[one.asname or one.name] = f"{node.module}.{one.name}"
                else:
                    names.classes[one.asname or one.name] = one.name
        elif isinstance(node, ast.Import):
            for one in node.names:
                if _LIGHTNING.match(one.name):
                    ours.add(id(one))
                    if one.asname is None:
                        names.packages[one.name.partition(".")[0]] = one.name.partition(".")[0]
                    elif _is_known(one.name):
                        names.packages[one.asname] = one.name
    bound = _bound(tree, ours)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    exported = _exported(tree)
    for name, old in names.classes.items():
        new = _CLASSES.get(old, old)
        theirs = new != old and (new in bound or (new in used and new not in names.classes))
        if name in bound or theirs or name in exported:
            names.kept.add(name)
    _leave_arguments(tree, names)
    return names


def _is_of_lightning(node: ast.ImportFrom) -> bool:
    return node.level == 0 and _LIGHTNING.match(node.module or "") is not None


def _is_module(name: str) -> bool:
    return f"drivetrain.{name}" in _PLACES


def _is_known(module: str) -> bool:
    """Whether a module of Lightning's has one of the same name here."""
    path = _inner(module.split("."))
    return not path or (len(path) == 1 and _is_module(path[0]))


def _bound(tree: ast.AST, ours: set[int]) -> set[str]:
    """All names that the file binds by something else than an import from Lightning."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        elif isinstance(node, ast.alias) and id(node) not in ours:
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            found.add(node.name)
    return found


def _exported(tree: ast.AST) -> set[str]:
    """The strings of ``__all__``: what other files import by these names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
                found |= {str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    return found


def _leave_arguments(tree: ast.AST, names: _Names) -> None:
    """Note where a function or a comprehension has a variable of its own by a package's name."""
    for node in ast.walk(tree):
        within: Sequence[ast.AST]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within, own = node.body, {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        elif isinstance(node, ast.Lambda):
            within, own = [node.body], {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            targets = [one for part in node.generators for one in ast.walk(part.target)]
            within, own = [node], {one.id for one in targets if isinstance(one, ast.Name)}
        else:
            continue
        for name in own & names.packages.keys():
            for one in (one for part in within for one in ast.walk(part)):
                if isinstance(one, ast.Name) and one.id == name:
                    names.others.add(id(one))


# What becomes of it


def _edit(edits: Edits, node: ast.expr | ast.stmt, size: int, old: str, new: str, back: bool = False) -> None:
    """Change so many bytes at a node's beginning, or before its end."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    line, start = (node.end_lineno, node.end_col_offset - size) if back else (node.lineno, node.col_offset)
    edits[line, start] = (line, start + size), old, new


def _import(
    node: ast.Import | ast.ImportFrom,
    lines: Sequence[bytes],
    names: _Names,
    edits: Edits,
    left: list[tuple[int, str]],
) -> None:
    new: list[str] = []
    if isinstance(node, ast.Import):
        if not any(_LIGHTNING.match(one.name) for one in node.names):
            return
        for one in node.names:
            module = one.name
            if _LIGHTNING.match(module) and not _is_known(module):
                left.append((node.lineno, f"import {module}: import what it is used for from drivetrain"))
            elif _LIGHTNING.match(module):
                module = ".".join(["drivetrain", *_inner(module.split("."))])
            new.append(f"import {module}" + (f" as {one.asname}" if one.asname else ""))
    elif not _is_of_lightning(node):
        return
    else:
        homes: dict[str, list[str]] = {}
        for one in node.names:
            name = _CLASSES.get(one.name, one.name)
            if not _inner([*str(node.module).split("."), one.name]):
                new.append(f"import drivetrain as {one.asname or one.name}")
                continue
            home = _homes().get(name)
            if home is None:
                what = "write the names that are used" if name == "*" else "has no counterpart that is known here"
                left.append((node.lineno, f"{one.name} of {node.module}{':' if name == '*' else ''} {what}"))
                home, name = node.module or "", one.name
            local = one.asname or (one.name if one.name in names.kept and name != one.name else None)
            homes.setdefault(home, []).append(name + (f" as {local}" if local else ""))
        new += [f"from {home} import {', '.join(found)}" for home, found in homes.items()]
    _statement(node, new, lines, edits)


def _statement(node: ast.stmt, new: list[str], lines: Sequence[bytes], edits: Edits) -> None:
    """Put imports where one stood; with the comments that stood in it, and nothing of what stands beside it."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    end = node.end_lineno, node.end_col_offset
    space = lines[node.lineno - 1][: node.col_offset].decode()
    after = lines[end[0] - 1][end[1] :].decode()
    comments = [text.decode() for text in _comments(node, lines)]
    if space.strip() or not re.match(r"\s*(#|$)", after):  # something else is in these lines
        edits[node.lineno, node.col_offset] = end, "", "; ".join(new)
        return
    newline = re.search(r"[\r\n]*$", lines[0].decode())
    joint = ((newline and newline[0]) or "\n") + space
    edits[node.lineno, node.col_offset] = end, "", joint.join(comments + new)


def _comments(node: ast.stmt, lines: Sequence[bytes]) -> Iterator[bytes]:
    """The comments within a statement of several lines."""
    assert node.end_lineno is not None
    for number in range(node.lineno, node.end_lineno):
        start = node.col_offset if number == node.lineno else 0
        found = re.search(rb"#[^\r\n]*", lines[number - 1][start:])  # an import holds no string
        if found:
            yield found[0].rstrip()


def _attribute(node: ast.Attribute, names: _Names, edits: Edits, left: list[tuple[int, str]]) -> None:
    owner = ast.unparse(node.value)
    path = names.path(node)
    if path is None:
        if names.class_of(node.value) == "Trainer" and not hasattr(import_module("drivetrain").Fit, node.attr):
            left.append((node.lineno, f"{owner}.{node.attr} is not here"))
        for end, text in (("trainer", trainer_attribute_error), ("trainer.strategy", strategy_attribute_error)):
            if owner == end or owner.endswith(f".{end}"):
                _, there, way = text(end, node.attr).partition(": ")
                if there:
                    left.append((node.lineno, f"{owner}.{node.attr}: {way.rstrip('.')}"))
        return
    name = _CLASSES.get(node.attr, node.attr)
    home = _homes().get(name)
    if not path:  # `lightning.pytorch`, or `L.pytorch`
        root = node.value
        assert isinstance(root, ast.Name)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        new = "drivetrain" if root.id in ("lightning", "pytorch_lightning") else root.id
        edits[node.lineno, node.col_offset] = (node.end_lineno, node.end_col_offset), f"{root.id}.{node.attr}", new
        return
    if isinstance(node.value, ast.Name) and names.packages[node.value.id] == node.value.id:  # it is written out
        _edit(edits, node.value, len(node.value.id), node.value.id, "drivetrain")
    if len(path) == 1:
        if home is None:
            left.append((node.lineno, f"{owner}.{node.attr} has no counterpart that is known here"))
        elif home != "drivetrain":
            left.append((node.lineno, f"{owner}.{node.attr}: write `from {home} import {name}`"))
    elif len(path) == 2 and home != f"drivetrain.{path[0]}":
        left.append((node.lineno, f"{owner}.{node.attr} has no counterpart in drivetrain.{path[0]}"))
    elif len(path) > 2:
        if node.attr in _CLASSES:
            left.append((node.lineno, f"{owner}.{node.attr}: write `from {home} import {name}`"))
        elif _CLASSES.get(path[-2]) == "Fit" and not hasattr(import_module("drivetrain").Fit, node.attr):
            left.append((node.lineno, f"{owner}.{node.attr} is not here"))
        return
    if name != node.attr and home is not None:
        _edit(edits, node, len(node.attr.encode()), node.attr, name, back=True)


def _annotations(node: ast.AST) -> Iterator[ast.Constant]:
    """The strings in an annotation, which are Python as well."""
    for part in ("annotation", "returns"):
        annotation = getattr(node, part, None)
        if isinstance(annotation, ast.expr):
            inert = {
                id(text)
                for one in ast.walk(annotation)
                if isinstance(one, ast.Subscript) and ast.unparse(one.value).rpartition(".")[2] == "Literal"
                for text in ast.walk(one.slice)
            }
            for one in ast.walk(annotation):
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in inert:
                    yield one


def _annotation(
    node: ast.Constant, lines: Sequence[bytes], names: _Names, edits: Edits, left: list[tuple[int, str]]
) -> None:
    assert node.end_col_offset is not None
    new = was = str(node.value)
    for name in names.classes:
        new = re.sub(rf"(?<![\w.]){re.escape(name)}\b", names.new(name), new)
    for package in names.packages:
        root = "drivetrain" if package in ("lightning", "pytorch_lightning") else package
        for old, name in _CLASSES.items():
            new = re.sub(rf"(?<![\w.]){re.escape(package)}\.(?:pytorch\.)?{old}\b", f"{root}.{name}", new)
    if new == was:
        return
    text = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode(errors="replace")
    if node.end_lineno == node.lineno and text[1:-1] == was:
        edits[node.lineno, node.col_offset] = (node.lineno, node.end_col_offset), text, text[0] + new + text[-1]
    else:
        left.append((node.lineno, f"an annotation names Lightning's classes: write {new!r}"))


def _arguments(node: ast.Call, names: _Names) -> Iterator[tuple[int, str]]:
    owner, _, called = ast.unparse(node.func).rpartition(".")
    is_trainer = names.class_of(node.func) == "Trainer"
    for keyword in node.keywords:
        name = keyword.arg
        if name is None:
            continue
        way = find_replacement(name) if is_trainer else None
        if name in _REMARKS and (is_trainer or called in ("fit", "validate", "test", "predict", "manual_backward")):
            way = _REMARKS[name]
        if way is not None:
            yield keyword.value.lineno, f"{name}=: {way}"
    if is_trainer and node.args:
        yield node.lineno, "Trainer(...) has positional arguments: Fit takes keywords"
    if called == "log" and len(node.args) > 2 and owner.rpartition(".")[2] in (*_MODULES, "lightning_module"):
        yield node.lineno, "log(...) has positional options: write them by name, as prog_bar=True"


def _definitions(node: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
        gone = {"training_epoch_end", "validation_epoch_end", "test_epoch_end", "optimizer_zero_grad", "backward"}
        if node.name in gone or re.fullmatch(r"on_\w+_model_(eval|train|zero_grad)", node.name):
            yield node.lineno, f"def {node.name}: nobody calls it; the error of the first run says what to write"
        if "dataloader_iter" in {one.arg for one in node.args.args}:
            yield node.lineno, f"def {node.name}: it gets a batch, and no dataloader_iter"


def _edited(lines: Sequence[bytes], edits: Edits, left: list[tuple[int, str]]) -> str:
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = b"".join(lines)
    for (number, column), (end, old, new) in sorted(edits.items(), reverse=True):
        first, last = starts[number - 1] + column, starts[end[0] - 1] + end[1]
        there = text[first:last].decode(errors="replace")
        if old and re.sub(r"\s", "", there) != re.sub(r"\s", "", old):  # in an f-string, Python 3.11 counts otherwise
            left.append((number, f"write {new} for {old}"))
            continue
        text = text[:first] + new.encode() + text[last:]
    return text.decode()


# Files


def _read(path: Path) -> tuple[str, str]:
    """A file's text, with its ends of lines as they are, and its encoding."""
    if path.suffix == ".ipynb":
        raise ValueError("it is a notebook: jupyter nbconvert --to script makes a Python file of it")
    content = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding), encoding


def _write(path: Path, content: bytes) -> None:
    """Put a file in another's place, with its mode; what ends this half-way leaves the old one."""
    path = path.resolve()
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(content)
        shutil.copymode(path, half)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def _difference(path: Path, before: str, after: str) -> Iterator[str]:
    for line in difflib.unified_diff(_LINE.findall(before), _LINE.findall(after), str(path), str(path)):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Migrate the files that are named; returns 1 where one cannot be read or written, else 0."""
    parser = argparse.ArgumentParser(prog="python -m drivetrain.migrate", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Python files written for Lightning")
    parser.add_argument("--write", action="store_true", help="change the files; else the difference is printed")
    given = parser.parse_args(arguments)
    failed = 0
    for path in given.files:
        try:
            source, encoding = _read(path)
            migrated = migrate(source)
            if given.write and migrated.source != source:
                _write(path, migrated.source.encode(encoding))
        except (OSError, ValueError, SyntaxError, RecursionError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = 1
            continue
        if not given.write:
            sys.stdout.writelines(_difference(path, source, migrated.source))
        for line, text in migrated.left:
            print(f"{path}:{line}: {text}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
