"""Searches the user's source files for calls of a method, which is then not reported as a misnamed hook."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable

_EXCLUDED_RECEIVERS = ("self", "cls", "trainer")
"""Names before the dot that are skipped: the caller searches the class for ``self``; a trainer has no user methods."""


def is_called_elsewhere(method: str, modules: Iterable[str]) -> bool:
    """Return whether one of the user's files contains ``something.<method>`` or a ``getattr`` whose name fits.

    Args:
        method: the method's name.
        modules: names of the Python modules that define the method's class and its bases. The script and all loaded
            modules in the same folders are searched too.
    """
    texts = (_read(path) for path in _source_files(modules))
    return any(_mentions(text, method) for text in texts if method in text or "getattr(" in text)


def _source_files(modules: Iterable[str]) -> set[str]:
    defining = {path for name in (*modules, "__main__") if (path := _path(name)) is not None}
    folders = {os.path.dirname(path) for path in defining if "site-packages" not in path}
    siblings = {path for name in list(sys.modules) if (path := _path(name)) and os.path.dirname(path) in folders}
    return defining | siblings


def _path(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and path.endswith(".py") else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _mentions(text: str, method: str) -> bool:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == method and _may_own_method(node.value):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names = node.args[1:2]
            if names and re.fullmatch(_name_pattern(names[0]), method):
                return True
    return False


def _may_own_method(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return not (isinstance(value.func, ast.Name) and value.func.id == "super")
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    return name not in _EXCLUDED_RECEIVERS


def _name_pattern(name: ast.expr) -> str:
    """Return a regular expression for the values of an expression: f"{stage}_step" may be "train_step"."""
    if isinstance(name, ast.Constant):
        return re.escape(str(name.value))
    if isinstance(name, ast.JoinedStr):
        return "".join(_name_pattern(part) if isinstance(part, ast.Constant) else ".+" for part in name.values)
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Add):
        return "".join(_name_pattern(part) if _is_text(part) else ".+" for part in (name.left, name.right))
    return "(?!)"  # matches nothing, because such a getattr would otherwise count as a call of every method


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant | ast.JoinedStr):
        return True
    return isinstance(node, ast.BinOp) and _name_pattern(node) != "(?!)"
