"""Finds the few packages that a machine with torch may lack, and installs them into a folder of their own.

Nothing is installed into the machine's Python, and torch is never installed: `pip install --target` puts missing
packages into a folder on PYTHONPATH. Packages that are present in a sufficient version are used as they are.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cuda"
SITE = FOLDER / "site"
WHEELS = ROOT / "cuda-wheels"


@dataclass(frozen=True)
class Needed:
    """A distribution, and the minimum version that is needed."""

    name: str
    least: str = "0"
    wanted_by: str = ""  # the optional package that needs it

    def is_there(self) -> bool:
        try:
            return _numbers(importlib.metadata.version(self.name)) >= _numbers(self.least)
        except importlib.metadata.PackageNotFoundError:
            return False


ALWAYS = (
    Needed("numpy", "1.26"),
    Needed("packaging", "22"),
    Needed("typing-extensions", "4.10"),
    Needed("fsspec", "2024.2"),
    Needed("safetensors", "0.7"),
    Needed("lightning-utilities", "0.11"),
    Needed("torchmetrics", "1.6"),
    Needed("pytest", "8.3"),
    Needed("pluggy", "1.5"),
    Needed("iniconfig", "2"),
    Needed("pygments", "2.7.2"),
    Needed("pytest-timeout", "2.3"),
)
FOR_DEEPSPEED = tuple(
    Needed(name, least, "deepspeed")
    for name, least in (
        ("deepspeed", "0.19"),
        ("einops", "0.7"),
        ("hjson", "3"),
        ("msgpack", "1"),
        ("ninja", "1.10"),
        ("psutil", "5"),
        ("py-cpuinfo", "8"),
        ("pydantic", "2"),
        ("pydantic-core", "2"),
        ("annotated-types", "0.6"),
        ("typing-inspection", "0.4"),
        ("tqdm", "4"),
    )
)
"""With all that they need, torch and its needs apart: they are installed one by one, so that nothing else comes."""


def missing() -> list[Needed]:
    """Return what this Python, including the folder of packages, does not have."""
    _search_site()
    return [each for each in (*ALWAYS, *FOR_DEEPSPEED) if not each.is_there()]


def provide(wheels: str | None) -> list[str]:
    """Install what is missing, from wheels or the package index; returns lines that describe the result.

    Args:
        wheels: a folder of wheels or its archive; None for ``cuda-wheels`` or ``cuda-wheels.tar`` next to the Makefile
            if one exists, otherwise for the index.

    Raises:
        RuntimeError: a required package is missing.
    """
    _describe_drivetrain()
    lacking = missing()
    if not lacking:
        return []
    source = _folder_of(wheels)
    where = f"from {source}" if source else "from the package index"
    names = [each.name for each in lacking]
    said = [f"This Python lacks {', '.join(names)}: they are brought {where} into {SITE.relative_to(ROOT)}."]
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    command += ["--target", str(SITE)]
    if source:
        command += ["--no-index", "--find-links", str(source)]
        offered = {_plain(path.name.partition("-")[0]) for path in source.glob("*.whl")}
        names = [name for name in names if _plain(name) in offered]
    else:
        command += ["--no-build-isolation", "-c", str(ROOT / "constraints.txt"), "--retries", "0", "--timeout", "15"]
    errors = ""
    # All at once, otherwise one by one: a package that does not fit this Python, or cannot be built, does not affect
    # the rest.
    for group in ([names], [[name] for name in names]):
        done = [_pip([*command, *some]) for some in group if some]
        errors = "\n".join(filter(None, done))
        if not errors:
            break
    _search_site()
    still = missing()
    for each in still:
        said.append(f"Still lacking: {each.name}{f', for {each.wanted_by}' if each.wanted_by else ''}.")
    if [each for each in still if each in ALWAYS]:
        lines = "\n".join([*said, errors[-1500:]])
        raise RuntimeError(
            f"{lines}\nWithout a network: run `make cuda-wheels` where there is one, and bring the archive "
            "cuda-wheels.tar that it makes to the root of the repository (or name it: WHEELS=/path)."
        )
    return said


def python_path() -> str:
    """Return PYTHONPATH for subprocesses: this repository with the tests' tools, then the folder of packages."""
    folders = [str(ROOT), *(str(ROOT / name) for name in ("framework", "strategies", "tests")), str(SITE)]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


def _search_site() -> None:
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
    importlib.invalidate_caches()


def _pip(command: list[str]) -> str:
    variables = {**os.environ, "DS_BUILD_OPS": "0", "PIP_NO_INPUT": "1"}
    variables.pop("PIP_CONSTRAINT", None)
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout)


def _folder_of(wheels: str | None) -> Path | None:
    candidates = [Path(wheels)] if wheels else [WHEELS, WHEELS.with_suffix(".tar")]
    found = next((path for path in candidates if path.exists()), None)
    if found is None or found.is_dir():
        if wheels and found is None:
            raise RuntimeError(f"There is no {wheels}, which WHEELS names.")
        return found
    unpacked = FOLDER / "wheels"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(found) as archive:
        archive.extractall(unpacked, filter="data")
    return next((path.parent for path in unpacked.rglob("*.whl")), unpacked)


def _describe_drivetrain() -> None:
    """Make strategies discoverable by name, as an editable install does, with a folder that contains only the entry
    points.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    source = (ROOT / settings["tool"]["hatch"]["version"]["path"]).read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    folder = SITE / f"{project['name']}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
