"""Runs a part of the test suite in a process of its own, and reads the results."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cuda.parts import ROOT


@dataclass(frozen=True)
class Ran:
    """The results of a test run.

    Attributes:
        names: of those that passed.
        skipped: skipped tests, with the reason.
        failed: failed tests, with the message.
        code: pytest's exit code.
    """

    names: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]
    code: int

    @property
    def passed(self) -> int:
        """Return the number of passed tests."""
        return len(self.names)


def run_tests(arguments: Sequence[str], rehearsed_devices: int, variables: dict[str, str] | None = None) -> Ran:
    """Run pytest with these arguments, on emulated devices, or on the machine's for 0."""
    # No user settings and no third-party plugins, which do not handle ranks and devices.
    environment = {**os.environ, **(variables or {}), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["GPUS_IN_TESTS"] = "1"  # otherwise tests/conftest.py hides them
    # For tests of deterministic runs: cuBLAS reads it once, before the first of them.
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    command = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-q"]
    if rehearsed_devices:
        environment["REHEARSED_DEVICES"] = str(rehearsed_devices)
        command += ["-p", "benchmarks.cuda.rehearsed_tests"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        done = subprocess.run([*command, f"--junitxml={file}", *arguments], cwd=ROOT, env=environment, check=False)
        if not file.exists():
            return Ran([], {}, {"pytest": f"it ended with code {done.returncode} and left no result"}, done.returncode)
        return _read(ElementTree.parse(file), done.returncode)


def _read(tree: ElementTree.ElementTree[Any], code: int) -> Ran:
    names: list[str] = []
    skipped, failed = {}, {}
    for case in tree.iter("testcase"):
        name = case.attrib["name"]
        bad = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        passed_over = case.find("skipped")
        if bad is not None:
            failed[name] = bad.attrib.get("message", "") or (bad.text or "")[-800:]
        elif passed_over is not None:
            skipped[name] = passed_over.attrib.get("message", "")
        else:
            names.append(name)
    return Ran(names, skipped, failed, code)
