"""Whether the user's files call a method: what somebody calls is a helper, by whatever name."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable

_NOT_IT = ("self", "cls", "trainer")
"""``self`` is told by the class's own code; what a trainer has is no method of the user's."""


def is_called_elsewhere(method: str, modules: Iterable[str]) -> bool:
    """Whether ``something.<method>`` or ``getattr(something, ...)`` stands in a file of the user's.

    Args:
        method: its name.
        modules: names of the modules that hold the object's classes; the loaded ones beside them and the script are
            looked at too.
    """
    texts = (_text(path) for path in _files(modules))
    return any(_mentions(text, method) for text in texts if method in text or "getattr(" in text)


def _files(modules: Iterable[str]) -> set[str]:
    own = {path for name in (*modules, "__main__") if (path := _path(name)) is not None}
    folders = {os.path.dirname(path) for path in own if "site-packages" not in path}
    beside = {path for name in list(sys.modules) if (path := _path(name)) and os.path.dirname(path) in folders}
    return own | beside


def _path(module: str) -> str | None:
    path = getattr(sys.modules.get(module), "__file__", None)
    return os.path.abspath(path) if isinstance(path, str) and path.endswith(".py") else None


def _text(path: str) -> str:
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
        if isinstance(node, ast.Attribute) and node.attr == method and _is_an_object(node.value):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            found = [one for one in node.args[1:2] if re.fullmatch(_pattern(one), method)]
            if found:
                return True
    return False


def _is_an_object(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return not (isinstance(value.func, ast.Name) and value.func.id == "super")
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    return name not in _NOT_IT


def _pattern(name: ast.expr) -> str:
    """What a name may be that is put together: "train_step" is one of ``f"{stage}_step"``."""
    if isinstance(name, ast.Constant):
        return re.escape(str(name.value))
    if isinstance(name, ast.JoinedStr):
        return "".join(_pattern(one) if isinstance(one, ast.Constant) else ".+" for one in name.values)
    if isinstance(name, ast.BinOp) and isinstance(name.op, ast.Add):
        return "".join(_pattern(one) if _is_text(one) else ".+" for one in (name.left, name.right))
    return "(?!)"  # anything, which tells nothing


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr) or (isinstance(node, ast.BinOp) and _pattern(node) != "(?!)")
