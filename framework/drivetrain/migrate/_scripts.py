"""Renames Lightning's names in a Python script, and lists the changes that remain to be made by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module

from drivetrain._config.foreign_names import STRATEGY_ATTRIBUTES, TRAINER_ATTRIBUTES, find_replacement
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
# Matches a line as Python's tokenizer splits them. str.splitlines would also split at other separators.
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


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
            name for another object or in a string, such as those of ``__all__``. These names are imported with ``as``.
        packages: maps each name that an import binds to a module of Lightning, or to ``lightning``, to that module.
        shadowed: the names in ``packages`` that are also arguments or variables of comprehensions in the file.
    """

    classes: dict[str, str] = field(default_factory=dict)
    aliased: set[str] = field(default_factory=set)
    packages: dict[str, str] = field(default_factory=dict)
    shadowed: set[str] = field(default_factory=set)

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
        if not isinstance(node, ast.Name) or node.id not in self.packages:
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
    script = _Script(source)
    changed = script.migrated() if script.imports_lightning else source
    try:
        ast.parse(changed)
    except SyntaxError:
        return Migrated(source, [(1, "the file could not be migrated: change the file by hand")])
    return Migrated(changed, sorted(set(script.remaining)))


class _Script:
    """The text of a script, and the edits that migrate it.

    A position is a line and a column in bytes, as in `ast`.
    """

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._lines = [line.encode() for line in LINE.findall(source)]
        self._names = _collect_names(self._tree)
        self._edits: dict[tuple[int, int], tuple[tuple[int, int], str, str]] = {}  # start: end, old ("": any), new
        newline = re.search(r"[\r\n]+$", self._lines[0].decode()) if self._lines else None
        self._newline = newline[0] if newline else "\n"  # is taken to end every line
        self.remaining: list[tuple[int, str]] = []
        """The changes that remain to be made by hand, with line numbers."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Constant) and _LIGHTNING_STRING.fullmatch(str(node.value)):
                self._note(node, f"{node.value!r} is a Lightning name in a string")

    @property
    def imports_lightning(self) -> bool:
        """Whether the script imports Lightning."""
        imports = (node for node in ast.walk(self._tree) if isinstance(node, ast.Import | ast.ImportFrom))
        return any(map(_mentions_lightning, imports))

    def migrated(self) -> str:
        """Return the script with drivetrain's names."""
        names = self._names
        reads = self._edit_checkpoint_reads()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                if _mentions_lightning(node):
                    self._edit_import(node)
            elif isinstance(node, ast.Name) and names.new_name_of(node.id) != node.id:
                self._replace(_start(node), _end(node), names.new_name_of(node.id), node.id)
            elif isinstance(node, ast.Attribute):
                self._edit_attribute(node)
            elif isinstance(node, ast.Call):
                self._note_arguments(node)
            for text in _annotation_strings(node):
                self._edit_annotation(text)
        if reads:
            self._import_checkpoint()
        return self._apply_edits()

    def _note(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.remaining.append((node.lineno, text))

    def _replace(self, start: tuple[int, int], end: tuple[int, int], new: str, old: str = "") -> None:
        """Replace the text between two positions. If it is not ``old``, apart from spaces, note the change instead."""
        self._edits[start] = end, old, new

    def _edit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Replace an import statement by others, and keep comments and other code on the same lines."""
        new = self._new_imports(node) if isinstance(node, ast.Import) else self._new_imports_from(node)
        end_line, end_column = _end(node)
        indent = self._lines[node.lineno - 1][: node.col_offset].decode()
        after = self._lines[end_line - 1][end_column:].decode()
        if indent.strip() or not re.match(r"\s*(#|$)", after):  # other statements share these lines
            text = "; ".join(new)
        else:
            text = (self._newline + indent).join([*self._comments_within(node), *new])
        self._replace(_start(node), _end(node), text)

    def _new_imports(self, node: ast.Import) -> list[str]:
        new = []
        for alias in node.names:
            module = alias.name
            if _LIGHTNING_MODULE.match(module) and not _has_counterpart(module):
                self._note(node, f"import {module}: import the names that you use from drivetrain")
            elif _LIGHTNING_MODULE.match(module):
                module = ".".join(["drivetrain", *_strip_package(module.split("."))])
            new.append(f"import {module}" + (f" as {alias.asname}" if alias.asname else ""))
        return new

    def _new_imports_from(self, node: ast.ImportFrom) -> list[str]:
        new: list[str] = []
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
                self._note(node, f"{alias.name} of {node.module}{note}")
                module_name, name = node.module or "", alias.name
            keeps_name = alias.name in self._names.aliased and name != alias.name
            local = alias.asname or (alias.name if keeps_name else None)
            names_by_module.setdefault(module_name, []).append(name + (f" as {local}" if local else ""))
        return new + [f"from {module} import {', '.join(imported)}" for module, imported in names_by_module.items()]

    def _comments_within(self, node: ast.stmt) -> Iterator[str]:
        """Yield the comments within an import that spans several lines."""
        for number in range(node.lineno, _end(node)[0]):
            start = node.col_offset if number == node.lineno else 0
            comment = re.search(rb"#[^\r\n]*", self._lines[number - 1][start:])  # an import contains no strings
            if comment:
                yield comment[0].rstrip().decode()

    def _edit_attribute(self, node: ast.Attribute) -> None:
        owner, names = ast.unparse(node.value), self._names
        path = names.lightning_path_of(node)
        if path is None:
            self._note_trainer_attribute(node, owner)
            return
        if owner.partition(".")[0] in names.shadowed:
            self._note(node, f"{owner}.{node.attr}: the file also has another object of the name of the package")
            return
        if not path:  # `lightning.pytorch`, or `L.pytorch`
            new = "drivetrain" if owner in ("lightning", "pytorch_lightning") else owner
            self._replace(_start(node), _end(node), new, f"{owner}.{node.attr}")
            return
        if isinstance(node.value, ast.Name) and names.packages[owner] == owner:  # imported without `as`
            self._replace(_start(node.value), _end(node.value), "drivetrain", owner)
        name = RENAMED_CLASSES.get(node.attr, node.attr)
        module_name = module_by_name().get(name)
        advice = f"write `from {module_name} import {name}`" if module_name else "has no known counterpart"
        if len(path) > 2:
            if node.attr in RENAMED_CLASSES:
                self._note(node, f"{owner}.{node.attr}: {advice}")
            elif RENAMED_CLASSES.get(path[-2]) == "Fit" and _is_not_of_fit(node.attr):
                self._note(node, f"{owner}.{node.attr} does not exist in drivetrain")
            return
        if module_name != ".".join(["drivetrain", *path[:-1]]):
            self._note(node, f"{owner}.{node.attr}: {advice}")
        if name != node.attr and module_name is not None:
            line, column = _end(node)
            self._replace((line, column - len(node.attr.encode())), _end(node), name, node.attr)

    def _note_trainer_attribute(self, node: ast.Attribute, owner: str) -> None:
        if self._names.class_of(node.value) == "Trainer" and _is_not_of_fit(node.attr):
            self._note(node, f"{owner}.{node.attr} does not exist in drivetrain")
        for name, replacements in (("trainer", TRAINER_ATTRIBUTES), ("trainer.strategy", STRATEGY_ATTRIBUTES)):
            if owner == name or owner.endswith(f".{name}"):
                advice = replacements.get(node.attr.lstrip("_"))
                if advice is not None:
                    self._note(node, f"{owner}.{node.attr}: {advice}")

    def _edit_checkpoint_reads(self) -> bool:
        """Rewrite ``torch.load(callback.best_model_path)["state_dict"]``; return whether there is any. Note others."""
        rewritten: set[int] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'state_dict'":
                path = _loaded_checkpoint(node.value)
                if path is not None:
                    rewritten.add(id(node.value))
                    # Two edits, because the path between them may contain names that change too.
                    self._replace(_start(node), _start(path), "drivetrain.checkpoint.evaluated_weights(")
                    self._replace(_end(path), _end(node), ")")
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and id(node) not in rewritten and _loaded_checkpoint(node) is not None:
                self._note(node, f"{ast.unparse(node)}: {_CHECKPOINT_NOTE}")
        return bool(rewritten)

    def _import_checkpoint(self) -> None:
        """Add ``import drivetrain.checkpoint`` before the first import of Lightning at the top level."""
        for node in self._tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and _start(node) in self._edits:
                end, old, new = self._edits[_start(node)]
                self._replace(_start(node), end, f"import drivetrain.checkpoint{self._newline}{new}", old)
                return
        self.remaining.append((1, "write import drivetrain.checkpoint"))

    def _edit_annotation(self, node: ast.Constant) -> None:
        new = old = str(node.value)
        for name in self._names.classes:
            new = re.sub(rf"(?<![\w.]){re.escape(name)}\b", self._names.new_name_of(name), new)
        for package in self._names.packages:
            root = "drivetrain" if package in ("lightning", "pytorch_lightning") else package
            for old_class, name in RENAMED_CLASSES.items():
                new = re.sub(rf"(?<![\w.]){re.escape(package)}\.(?:pytorch\.)?{old_class}\b", f"{root}.{name}", new)
        if new == old:
            return
        text = self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode(errors="replace")
        if node.end_lineno == node.lineno and text[1:-1] == old:
            self._replace(_start(node), _end(node), text[0] + new + text[-1], text)
        else:
            self._note(node, f"an annotation contains Lightning's classes: write {new!r}")

    def _note_arguments(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        is_trainer = self._names.class_of(node.func) == "Trainer"
        for keyword in node.keywords:
            name = keyword.arg
            if name is None:
                continue
            advice = find_replacement(name) if is_trainer else None
            if is_trainer or called in ("fit", "validate", "test", "predict", "manual_backward"):
                advice = _ARGUMENT_NOTES.get(name, advice)
            if advice is not None:
                self._note(keyword.value, f"{name}=: {advice}")

    def _apply_edits(self) -> str:
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        text = b"".join(self._lines)
        for (number, column), (end, old, new) in sorted(self._edits.items(), reverse=True):
            first, last = starts[number - 1] + column, starts[end[0] - 1] + end[1]
            current = text[first:last].decode(errors="replace")
            # Python 3.11 reports wrong columns in f-strings.
            if old and re.sub(r"\s", "", current) != re.sub(r"\s", "", old):
                self.remaining.append((number, f"replace {old} by {new}"))
                continue
            text = text[:first] + new.encode() + text[last:]
        return text.decode()


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _is_not_of_fit(attribute: str) -> bool:
    return not hasattr(import_module("drivetrain").Fit, attribute)


def _loaded_checkpoint(node: ast.expr) -> ast.expr | None:
    """Return the path that ``torch.load`` reads, if it is a path that a checkpoint callback gives."""
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) == "torch.load":
        path = node.args[0]
        if isinstance(path, ast.Attribute) and path.attr in _CHECKPOINT_PATHS:
            return path
    return None


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
    for name, old in names.classes.items():
        new = RENAMED_CLASSES.get(old, old)
        new_is_taken = new != old and (new in bound or (new in used and new not in names.classes))
        if name in bound or new_is_taken:
            names.aliased.add(name)
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension):
            local |= {child.id for child in ast.walk(node.target) if isinstance(child, ast.Name)}
    names.shadowed = local & names.packages.keys()
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
    """Return the names that the file binds, except those that are only imported from Lightning, and its strings."""
    found_names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) not in lightning_nodes and not isinstance(getattr(node, "ctx", None), ast.Load):
            texts = [getattr(node, part, None) for part in ("id", "name", "asname", "arg", "value")]
            found_names.update(text.partition(".")[0] for text in texts if isinstance(text, str))
    return found_names
