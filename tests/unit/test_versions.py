"""Other packages: the private names that `docs/versions.md` lists exist, and what pyproject.toml requires is used."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.testing import requires_command, requires_package
from drivetrain_strategies.deepspeed._library import VERSIONS, import_library

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()
ROW = re.compile(r"^\| `(?P<owner>[\w.]+)` \| (?P<names>`.*?) \| .* \|$", re.MULTILINE)
STATED = [(row["owner"], row["names"]) for row in ROW.finditer(PAGE)]
ROWS = [pytest.param(*row, id=row[0], marks=requires_package(row[0].partition(".")[0])) for row in STATED]

# Public despite their underscore, and names that Python gives to every named tuple. ``_saved_self`` is a saved tensor
# of a graph node, which torch's notes on autograd document.
PUBLIC = {"_strip_protocol", "_exit", "_getframe", "_current_frames", "_fields", "_make", "_replace", "_saved_self"}
PARTS_OF_MODULES = {"_C", "_python_dispatch"}  # torch.utils._python_dispatch.name: the last part is the name

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_DEVELOPMENT = {"test", "docs", "dev", "bench"}
IMPORTED_BY_OTHERS = {
    "alembic": "mlflow migrates its local store with it",
    "onnxruntime": "users run an exported model with it",
    "s3fs": "fsspec imports it for s3:// paths",
    "sqlalchemy": "mlflow's local store",
}
MODULE_OF = {"mlflow-skinny": "mlflow", "zlib-ng": "zlib_ng"}


@pytest.mark.parametrize(("owner", "names"), ROWS)
def test_private_names_exist(owner: str, names: str) -> None:  # O-06
    if owner.endswith("NCCL") and not dist.is_nccl_available():
        pytest.skip("needs a build of torch with NCCL")
    if owner.startswith("deepspeed."):
        import_library()
    assert not _missing(owner, names)


def test_every_private_name_that_is_used_is_stated() -> None:  # O-06
    stated = {name for _, names in STATED for name in re.findall(r"`(\w+)`", names)}
    own = {name for path in _sources() for name in _defined_in(path)}
    found = {name: where for path in _sources() for name, where in _foreign_private_names(path)}
    assert {name: where for name, where in found.items() if name not in stated | own} == {}
    # Each table is read.
    assert len(STATED) == len(re.findall(r"^\| `[\w.]+` \| `", PAGE, re.MULTILINE)) > 50
    assert _missing("torch.nn.Module", "`_modules` `_modulos`") == ["_modulos"]
    assert _missing("torch.nn.Module", "`_modulos` or `_modules` `_parameters` `_modulos` or none") == []


@requires_command("make")
def test_the_lower_bounds_are_the_tested_ones() -> None:  # O-06
    project = (ROOT / "pyproject.toml").read_text()
    (floor,) = re.findall(r'"torch>=([\d.]+)"', project)
    command = ["make", "-n", "-B", ".venv-floor/.stamp"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f" torch=={floor}\n" in made.stdout
    assert f'"deepspeed{VERSIONS}"' in project


def test_each_package_of_an_extra_is_imported() -> None:
    requirements = [each for extra in EXTRAS.keys() - FOR_DEVELOPMENT for each in EXTRAS[extra]]
    packages = [re.split(r"[\[<>=]", requirement)[0].strip() for requirement in requirements]
    modules = {MODULE_OF.get(package, package) for package in packages} - IMPORTED_BY_OTHERS.keys()
    assert not modules - {name for path in _sources("examples") for name in _imported_packages(path)}


def _imported_packages(path: Path) -> Iterator[str]:
    """Return the top-level packages that the file imports or looks for by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # import_module("wandb.proto")
            yield node.value.partition(".")[0]


def _missing(owner: str, names: str) -> list[str]:
    """Return those of ``names`` that neither the owner has nor its class's or module's source assigns."""
    found = pkgutil.resolve_name(owner)
    joined = names.replace("` or `", "|").replace("` or none", "|none`")
    choices = [choice.split("|") for choice in re.findall(r"`([\w|]+)`", joined)]
    return [" or ".join(each) for each in choices if not any(name == "none" or _has(found, name) for name in each)]


def _has(owner: Any, name: str) -> bool:
    """Return whether it has the name, or the source of its module or of its bases' modules contains the name."""
    if inspect.ismodule(owner):
        modules = {owner.__name__}
    else:
        modules = {kind.__module__ for kind in getattr(owner, "__mro__", [owner])}
    files = [getattr(sys.modules.get(module), "__file__", None) or "" for module in modules]
    return hasattr(owner, name) or any(name in _names_in(Path(file)) for file in files if file.endswith(".py"))


@cache
def _names_in(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return used | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _sources(*others: str) -> Iterator[Path]:
    for root in ("framework", "strategies", *others):
        yield from (ROOT / root).rglob("*.py")


def _foreign_private_names(path: Path) -> Iterator[tuple[str, str]]:
    """Return names with one leading underscore that the file uses, and that none of our files defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{os.path.relpath(path, ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("drivetrain"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        else:
            continue
        for name in names:
            if re.match(r"_[^_]", name) and name not in PUBLIC | PARTS_OF_MODULES:
                yield name, where


def _defined_in(path: Path) -> set[str]:
    own = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own
