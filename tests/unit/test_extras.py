"""Every extra in pyproject.toml installs something that our code imports."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOR_DEVELOPMENT = {"test", "docs", "dev", "bench"}
IMPORTED_BY_OTHERS = {
    "alembic": "mlflow migrates its local store with it",
    "onnxruntime": "users run an exported model with it",
    "s3fs": "fsspec imports it for s3:// paths",
    "sqlalchemy": "mlflow's local store",
}
MODULE_OF = {"mlflow-skinny": "mlflow", "zlib-ng": "zlib_ng"}


def imported_packages() -> set[str]:
    """Return the top-level packages that both source roots and the examples import or look for by name."""
    found: set[str] = set()
    for folder in ("framework", "strategies", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # import_module("wandb.proto")
                    found.add(node.value.partition(".")[0])
    return found


def test_each_package_of_an_extra_is_imported() -> None:
    requirements = [each for extra in EXTRAS.keys() - FOR_DEVELOPMENT for each in EXTRAS[extra]]
    packages = [re.split(r"[\[<>=]", requirement)[0].strip() for requirement in requirements]
    modules = {MODULE_OF.get(package, package) for package in packages} - IMPORTED_BY_OTHERS.keys()
    assert not modules - imported_packages()
