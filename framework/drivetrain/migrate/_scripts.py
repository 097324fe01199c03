"""Renames Lightning's names in a Python script, and lists the changes that remain to be made by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TypeAlias

from drivetrain._config.lightning_names import strategy_attribute_error, trainer_attribute_error
from drivetrain._config.old_names import find_replacement
from drivetrain.migrate._names import PUBLIC_MODULES, RENAMED_CLASSES, module_by_name

_LIGHTNING_MODULE = re.compile(r"(lightning|lightning\.pytorch|pytorch_lightning)(\.|$)")
_LIGHTNING_STRING = re.compile(r"(lightning|pytorch_lightning)(\.\w+)+")  # for example an argument of mock.patch
_TYPE_ALIASES = ("STEP_OUTPUT", "TRAIN_DATALOADERS", "EVAL_DATALOADERS", "OptimizerLRScheduler")
"""Lightning's aliases of types, which annotations use. They are imported as ``Any``."""
_CHECKPOINT_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")
_CHECKPOINT_NOTE = (
    "a drivetrain checkpoint is a folder: drivetrain.checkpoint.load(path) gives weights() and averages()"
)
_ARGUMENT_NOTES = {
    "plugins": "plugins= has no counterpart: pass environment=, precision= or strategy=",
    "weights_only": "weights_only= is not needed: a checkpoint holds no pickle",
    "retain_graph": "retain_graph= is refused: add the losses, and call manual_backward once",
}
_MODULE_VARIABLES = ("self", "module", "pl_module", "model")
# Matches a line as Python's tokenizer splits them. str.splitlines would also split at other separators.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")

Edits: TypeAlias = dict[tuple[int, int], tuple[tuple[int, int], str, str]]
"""Maps the start of an edit (line, column in bytes) to the end, the text to replace ("" for any) and the new text."""


@dataclass(slots=True)
class Migrated:
    """The result of `migrate`.

    Attributes:
        source: the new text.
        remaining: the changes that remain to be made by hand, with line numbers in the old text.
    """

    source: str
    remaining: list[tuple[int, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Names:
    """The names by which a file refers to Lightning.

    Attributes:
        classes: maps each name that an import binds to a class to Lightning's name of the class.
        aliased: the names in ``classes`` that must not change in the file, because the file uses the old or the new
            name for another object, or exports the old name. These names are imported with ``as``.
        packages: maps each name that an import binds to a module of Lightning, or to ``lightning``, to that module.
        shadowed: the ids of `ast.Name` nodes that have a name in ``packages`` but refer to arguments or loop variables.
    """

    classes: dict[str, str] = field(default_factory=dict)
    aliased: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)
    shadowed: set[int] = field(default_factory=set)

    def new_name_of(self, name: str) -> str:
        """Return the name that replaces ``name`` in the file; ``name`` itself if it does not change."""
        old = self.classes.get(name)
        return name if old != name or name in self.aliased else RENAMED_CLASSES.get(name, name)

    def lightning_path_of(self, node: ast.expr) -> list[str] | None:
        """Return the parts after ``pl`` of an expression such as ``pl.callbacks.Timer``; None for other expressions."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.packages or id(node) in self.shadowed:
            return None
        return _strip_package(self.packages[node.id].split(".") + parts[::-1])

    def class_of(self, node: ast.expr) -> str:
        """Return Lightning's name of the class that an expression refers to; "" for other expressions."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id, "")
        path = self.lightning_path_of(node)
        return path[-1] if path else ""


def _strip_package(path: list[str]) -> list[str]:
    """Return a dotted path without the name of Lightning's package at the beginning."""
    return path[2:] if path[:2] == ["lightning", "pytorch"] else path[1:]


def migrate(source: str) -> Migrated:
    """Return a script with drivetrain's names. A script that does not import Lightning is returned unchanged.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    tree = ast.parse(source)
    lines = [line.encode() for line in _LINE.findall(source)]
    remaining: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _LIGHTNING_STRING.fullmatch(node.value):
            remaining.append((node.lineno, f"{node.value!r} is a Lightning name in a string"))
    names = _collect_names(tree)
    if not any(isinstance(node, ast.Import | ast.ImportFrom) and _mentions_lightning(node) for node in ast.walk(tree)):
        return Migrated(source, sorted(set(remaining)))
    edits: Edits = {}
    reads = _edit_checkpoint_reads(tree, edits, remaining)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            _edit_import(node, lines, names, edits, remaining)
        elif isinstance(node, ast.Name) and names.new_name_of(node.id) != node.id:
            _add_edit(edits, node, len(node.id.encode()), node.id, names.new_name_of(node.id))
        elif isinstance(node, ast.Attribute):
            _edit_attribute(node, names, edits, remaining)
        elif isinstance(node, ast.Call):
            remaining += _argument_notes(node, names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            remaining += _definition_notes(node)
        for text in _annotation_strings(node):
            _edit_annotation(text, lines, names, edits, remaining)
    if reads:
        _import_checkpoint(tree, lines, edits, remaining)
    changed = _apply_edits(lines, edits, remaining)
    try:
        ast.parse(changed)
    except SyntaxError:
        return Migrated(source, [(1, "the file could not be migrated: change the file by hand")])
    return Migrated(changed, sorted(set(remaining)))


# Finding the names that refer to Lightning


def _collect_names(tree: ast.AST) -> _Names:
    names = _Names()
    lightning_nodes: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _imports_lightning(node):
            for alias in node.names:
                lightning_nodes.add(id(alias))
                path = _strip_package([*str(node.module).split("."), alias.name])
                if not path or (len(path) == 1 and _is_module(alias.name)):
                    names.packages[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    names.classes[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _LIGHTNING_MODULE.match(alias.name):
                    lightning_nodes.add(id(alias))
                    if alias.asname is None:
                        names.packages[alias.name.partition(".")[0]] = alias.name.partition(".")[0]
                    elif _has_counterpart(alias.name):
                        names.packages[alias.asname] = alias.name
    bound = _bound_names(tree, lightning_nodes)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    exported = _exported_names(tree)
    for name, old in names.classes.items():
        new = RENAMED_CLASSES.get(old, old)
        new_is_taken = new != old and (new in bound or (new in used and new not in names.classes))
        if name in bound or new_is_taken or name in exported:
            names.aliased.add(name)
    _mark_shadowed(tree, names)
    return names


def _imports_lightning(node: ast.ImportFrom) -> bool:
    return node.level == 0 and _LIGHTNING_MODULE.match(node.module or "") is not None


def _mentions_lightning(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return _imports_lightning(node)
    return any(_LIGHTNING_MODULE.match(alias.name) for alias in node.names)


def _is_module(name: str) -> bool:
    return f"drivetrain.{name}" in PUBLIC_MODULES


def _has_counterpart(module: str) -> bool:
    """Return whether drivetrain has a module of the same name as a Lightning module."""
    path = _strip_package(module.split("."))
    return not path or (len(path) == 1 and _is_module(path[0]))


def _bound_names(tree: ast.AST, lightning_nodes: set[int]) -> set[str]:
    """Return all names that the file binds, except those that are only imported from Lightning."""
    found_names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found_names.add(node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found_names.add(node.name)
        elif isinstance(node, ast.arg):
            found_names.add(node.arg)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found_names.update(node.names)
        elif isinstance(node, ast.alias) and id(node) not in lightning_nodes:
            found_names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            found_names.add(node.name)
    return found_names


def _exported_names(tree: ast.AST) -> set[str]:
    """Return the strings in ``__all__``, which are names that other files may import."""
    found_names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(child, ast.Name) and child.id == "__all__" for child in targets):
                found_names |= {str(child.value) for child in ast.walk(node.value) if isinstance(child, ast.Constant)}
    return found_names


def _mark_shadowed(tree: ast.AST, names: _Names) -> None:
    """Mark the uses of local variables, of functions and comprehensions, that have the name of a package."""
    for node in ast.walk(tree):
        scope: Sequence[ast.AST]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            scope, local_names = node.body, {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
        elif isinstance(node, ast.Lambda):
            scope, local_names = [node.body], {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            targets = [child for part in node.generators for child in ast.walk(part.target)]
            scope, local_names = [node], {child.id for child in targets if isinstance(child, ast.Name)}
        else:
            continue
        for name in local_names & names.packages.keys():
            for child in (child for part in scope for child in ast.walk(part)):
                if isinstance(child, ast.Name) and child.id == name:
                    names.shadowed.add(id(child))


# Collecting and applying the edits, and noting the changes that remain to be made


def _add_edit(edits: Edits, node: ast.expr | ast.stmt, size: int, old: str, new: str, from_end: bool = False) -> None:
    """Add an edit that replaces the first ``size`` bytes of a node, or with ``from_end`` the last ones."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    line, start = (node.end_lineno, node.end_col_offset - size) if from_end else (node.lineno, node.col_offset)
    edits[line, start] = (line, start + size), old, new


def _edit_import(
    node: ast.Import | ast.ImportFrom,
    lines: Sequence[bytes],
    names: _Names,
    edits: Edits,
    remaining: list[tuple[int, str]],
) -> None:
    new: list[str] = []
    if isinstance(node, ast.Import):
        if not _mentions_lightning(node):
            return
        for alias in node.names:
            module = alias.name
            if _LIGHTNING_MODULE.match(module) and not _has_counterpart(module):
                remaining.append((node.lineno, f"import {module}: import the names that you use from drivetrain"))
            elif _LIGHTNING_MODULE.match(module):
                module = ".".join(["drivetrain", *_strip_package(module.split("."))])
            new.append(f"import {module}" + (f" as {alias.asname}" if alias.asname else ""))
    elif not _imports_lightning(node):
        return
    else:
        names_by_module: dict[str, list[str]] = {}
        for alias in node.names:
            name = RENAMED_CLASSES.get(alias.name, alias.name)
            if not _strip_package([*str(node.module).split("."), alias.name]):
                new.append(f"import drivetrain as {alias.asname or alias.name}")
                continue
            module_name = module_by_name().get(name)
            if name in _TYPE_ALIASES:
                names_by_module.setdefault("typing", []).append(f"Any as {alias.asname or name}")
                continue
            if module_name is None:
                note = ": import the names that are used" if name == "*" else " has no known counterpart"
                remaining.append((node.lineno, f"{alias.name} of {node.module}{note}"))
                module_name, name = node.module or "", alias.name
            local = alias.asname or (alias.name if alias.name in names.aliased and name != alias.name else None)
            names_by_module.setdefault(module_name, []).append(name + (f" as {local}" if local else ""))
        new += [f"from {module_name} import {', '.join(imported)}" for module_name, imported in names_by_module.items()]
    _replace_statement(node, new, lines, edits)


def _replace_statement(node: ast.stmt, new: list[str], lines: Sequence[bytes], edits: Edits) -> None:
    """Replace an import statement by other statements, and keep comments and other code on the same lines."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    end = node.end_lineno, node.end_col_offset
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    after = lines[end[0] - 1][end[1] :].decode()
    comments = [text.decode() for text in _comments(node, lines)]
    if indent.strip() or not re.match(r"\s*(#|$)", after):  # Other statements share these lines.
        edits[node.lineno, node.col_offset] = end, "", "; ".join(new)
        return
    separator = _newline(lines) + indent
    edits[node.lineno, node.col_offset] = end, "", separator.join(comments + new)


def _newline(lines: Sequence[bytes]) -> str:
    """Return what ends the first line, which is taken to end every line."""
    newline = re.search(r"[\r\n]+$", lines[0].decode())
    return newline[0] if newline else "\n"


def _comments(node: ast.stmt, lines: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the comments within a statement that spans several lines."""
    assert node.end_lineno is not None
    for number in range(node.lineno, node.end_lineno):
        start = node.col_offset if number == node.lineno else 0
        comment = re.search(rb"#[^\r\n]*", lines[number - 1][start:])  # An import contains no strings.
        if comment:
            yield comment[0].rstrip()


def _edit_attribute(node: ast.Attribute, names: _Names, edits: Edits, remaining: list[tuple[int, str]]) -> None:
    owner = ast.unparse(node.value)
    path = names.lightning_path_of(node)
    if path is None:
        if names.class_of(node.value) == "Trainer" and not hasattr(import_module("drivetrain").Fit, node.attr):
            remaining.append((node.lineno, f"{owner}.{node.attr} does not exist in drivetrain"))
        for name, error_text in (("trainer", trainer_attribute_error), ("trainer.strategy", strategy_attribute_error)):
            if owner == name or owner.endswith(f".{name}"):
                _, separator, advice = error_text(name, node.attr).partition(": ")
                if separator:
                    remaining.append((node.lineno, f"{owner}.{node.attr}: {advice.rstrip('.')}"))
        return
    name = RENAMED_CLASSES.get(node.attr, node.attr)
    module_name = module_by_name().get(name)
    if not path:  # `lightning.pytorch`, or `L.pytorch`
        root = node.value
        assert isinstance(root, ast.Name)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        new = "drivetrain" if root.id in ("lightning", "pytorch_lightning") else root.id
        edits[node.lineno, node.col_offset] = (node.end_lineno, node.end_col_offset), f"{root.id}.{node.attr}", new
        return
    if isinstance(node.value, ast.Name) and names.packages[node.value.id] == node.value.id:  # imported without `as`
        _add_edit(edits, node.value, len(node.value.id), node.value.id, "drivetrain")
    if len(path) == 1:
        if module_name is None:
            remaining.append((node.lineno, f"{owner}.{node.attr} has no known counterpart"))
        elif module_name != "drivetrain":
            remaining.append((node.lineno, f"{owner}.{node.attr}: write `from {module_name} import {name}`"))
    elif len(path) == 2 and module_name != f"drivetrain.{path[0]}":
        advice = f": write `from {module_name} import {name}`" if module_name else ""
        text = f"{owner}.{node.attr} has no counterpart in drivetrain.{path[0]}{advice}"
        remaining.append((node.lineno, text))
    elif len(path) > 2:
        if node.attr in RENAMED_CLASSES:
            remaining.append((node.lineno, f"{owner}.{node.attr}: write `from {module_name} import {name}`"))
        elif RENAMED_CLASSES.get(path[-2]) == "Fit" and not hasattr(import_module("drivetrain").Fit, node.attr):
            remaining.append((node.lineno, f"{owner}.{node.attr} does not exist in drivetrain"))
        return
    if name != node.attr and module_name is not None:
        _add_edit(edits, node, len(node.attr.encode()), node.attr, name, from_end=True)


def _edit_checkpoint_reads(tree: ast.AST, edits: Edits, remaining: list[tuple[int, str]]) -> int:
    """Rewrite ``torch.load(callback.best_model_path)["state_dict"]``; return how often. Note other reads."""
    rewritten: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and node.slice.value == "state_dict"
            and (path := _loaded_checkpoint(node.value)) is not None
        ):
            rewritten.add(id(node.value))
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            assert path.end_lineno is not None
            assert path.end_col_offset is not None
            # Two edits, because the path between them may contain names that change too.
            start, end = (path.lineno, path.col_offset), (path.end_lineno, path.end_col_offset)
            edits[node.lineno, node.col_offset] = start, "", "drivetrain.checkpoint.evaluated_weights("
            edits[end] = (node.end_lineno, node.end_col_offset), "", ")"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in rewritten and _loaded_checkpoint(node) is not None:
            remaining.append((node.lineno, f"{ast.unparse(node)}: {_CHECKPOINT_NOTE}"))
    return len(rewritten)


def _loaded_checkpoint(node: ast.expr) -> ast.expr | None:
    """Return the path that ``torch.load`` reads, if it is a path that a checkpoint callback gives."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "torch.load":
        path = node.args[0]
        if isinstance(path, ast.Attribute) and path.attr in _CHECKPOINT_PATHS:
            return path
    return None


def _import_checkpoint(
    tree: ast.Module, lines: Sequence[bytes], edits: Edits, remaining: list[tuple[int, str]]
) -> None:
    """Add ``import drivetrain.checkpoint`` before the first import of Lightning at the top level."""
    for node in tree.body:
        key = node.lineno, node.col_offset
        if isinstance(node, ast.Import | ast.ImportFrom) and key in edits:
            end, old, new = edits[key]
            edits[key] = end, old, f"import drivetrain.checkpoint{_newline(lines)}{new}"
            return
    remaining.append((1, "write import drivetrain.checkpoint"))


def _annotation_strings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings in a node's annotations that contain Python code."""
    for part in ("annotation", "returns"):
        annotation = getattr(node, part, None)
        if isinstance(annotation, ast.expr):
            literals = {
                id(text)
                for child in ast.walk(annotation)
                if isinstance(child, ast.Subscript) and ast.unparse(child.value).rpartition(".")[2] == "Literal"
                for text in ast.walk(child.slice)
            }
            for child in ast.walk(annotation):
                if isinstance(child, ast.Constant) and isinstance(child.value, str) and id(child) not in literals:
                    yield child


def _edit_annotation(
    node: ast.Constant, lines: Sequence[bytes], names: _Names, edits: Edits, remaining: list[tuple[int, str]]
) -> None:
    assert node.end_col_offset is not None
    new = old_text = str(node.value)
    for name in names.classes:
        new = re.sub(rf"(?<![\w.]){re.escape(name)}\b", names.new_name_of(name), new)
    for package in names.packages:
        root = "drivetrain" if package in ("lightning", "pytorch_lightning") else package
        for old, name in RENAMED_CLASSES.items():
            new = re.sub(rf"(?<![\w.]){re.escape(package)}\.(?:pytorch\.)?{old}\b", f"{root}.{name}", new)
    if new == old_text:
        return
    text = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode(errors="replace")
    if node.end_lineno == node.lineno and text[1:-1] == old_text:
        edits[node.lineno, node.col_offset] = (node.lineno, node.end_col_offset), text, text[0] + new + text[-1]
    else:
        remaining.append((node.lineno, f"an annotation contains Lightning's classes: write {new!r}"))


def _argument_notes(node: ast.Call, names: _Names) -> Iterator[tuple[int, str]]:
    owner, _, called = ast.unparse(node.func).rpartition(".")
    is_trainer = names.class_of(node.func) == "Trainer"
    for keyword in node.keywords:
        name = keyword.arg
        if name is None:
            continue
        advice = find_replacement(name) if is_trainer else None
        if name in _ARGUMENT_NOTES and (
            is_trainer or called in ("fit", "validate", "test", "predict", "manual_backward")
        ):
            advice = _ARGUMENT_NOTES[name]
        if advice is not None:
            yield keyword.value.lineno, f"{name}=: {advice}"
    if is_trainer and node.args:
        yield node.lineno, "Trainer(...) has positional arguments: Fit takes keywords"
    if called == "log" and len(node.args) > 2 and owner.rpartition(".")[2] in (*_MODULE_VARIABLES, "lightning_module"):
        yield node.lineno, "log(...) has positional options: write them by name, as prog_bar=True"


def _definition_notes(node: ast.ClassDef | ast.FunctionDef) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
        removed_hooks = {"training_epoch_end", "validation_epoch_end", "test_epoch_end"}
        if node.name in removed_hooks or re.fullmatch(r"on_\w+_model_zero_grad", node.name):
            yield node.lineno, f"def {node.name} is never called: the error of the first run names the replacement"
        if "dataloader_iter" in {child.arg for child in node.args.args}:
            yield node.lineno, f"def {node.name} is called with a batch instead of dataloader_iter"


def _apply_edits(lines: Sequence[bytes], edits: Edits, remaining: list[tuple[int, str]]) -> str:
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text = b"".join(lines)
    for (number, column), (end, old, new) in sorted(edits.items(), reverse=True):
        first, last = starts[number - 1] + column, starts[end[0] - 1] + end[1]
        current = text[first:last].decode(errors="replace")
        # Python 3.11 reports wrong columns in f-strings.
        if old and re.sub(r"\s", "", current) != re.sub(r"\s", "", old):
            remaining.append((number, f"replace {old} by {new}"))
            continue
        text = text[:first] + new.encode() + text[last:]
    return text.decode()
