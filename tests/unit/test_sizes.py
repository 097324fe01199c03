"""The sizes of the suite: the rule that decides, and the closing line of both."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sizes import Shown, small_tests

ROOT = Path(__file__).parents[2]


SETUPS = {  # by the test's name: its strategy and precision
    "ddp": {"ddp", "32-true"},
    "fsdp": {"fsdp", "32-true"},
    "bf16": {"ddp", "bf16-mixed"},
    "fsdp_bf16": {"fsdp", "bf16-mixed"},
}


@pytest.mark.parametrize(
    ("behaviours", "slow", "small"),
    [
        pytest.param({"fast": "", "slow": ""}, "slow", "fast", id="what is fast"),
        pytest.param({"one": "", "two": ""}, "one two", "one", id="one of a file of slow tests"),
        pytest.param(
            {"fast": "A-01", "covered": "A-01", "first": "A-01 B-02", "second": "B-02"},
            *("covered first second", "fast first"),
            id="the first of a behaviour",
        ),
        pytest.param(
            dict.fromkeys(SETUPS, ""),
            *("fsdp bf16 fsdp_bf16", "ddp fsdp bf16"),
            id="the first of a strategy or precision in its file",
        ),
    ],
)
def test_what_no_small_test_shows_makes_a_slow_test_small(behaviours: dict[str, str], slow: str, small: str) -> None:
    file = "tests/test_a.py::"
    tests = [
        Shown(f"{file}{name}", frozenset(ids.split()), frozenset(SETUPS.get(name, ())))
        for name, ids in behaviours.items()
    ]
    assert small_tests(tests, [f"{file}{name}" for name in slow.split()]) == {f"{file}{name}" for name in small.split()}


def test_each_guaranteed_behaviour_is_cited_by_a_test() -> None:
    """Check that the small size, which has a test of each cited behaviour, has one of each that the page promises."""
    promised = set(re.findall(r"^\| ([A-S]-\d\d) \|", (ROOT / "docs/behaviours.md").read_text(), re.MULTILINE))
    cited: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                cited.update(re.findall(r"\b[A-S]-\d\d\b", "\n".join(lines[node.lineno - 1 : node.end_lineno])))
    assert len(promised) > 150
    assert promised <= cited


def test_the_matrix_of_parity_is_small_but_for_what_is_repeated_on_four_processes() -> None:
    small = [
        "ddp-2-plain-32-true",
        "ddp-2-plain-bf16-mixed",
        "hsdp-4-plain-32-true",
        "hsdp-4-zero-weight_window-32-true",
    ]
    repeated = ["hsdp-4-plain-bf16-mixed", "ddp-4-plain-32-true"]
    names = [f"tests/parity/test_parity.py::test_training[{id}]" for id in (*small, *repeated)]
    names += [f"tests/parity/test_parity_evaluation.py::test_evaluation[{id}]" for id in ("hsdp-4", "ddp-2")]
    assert set(names) - small_tests([Shown(name) for name in names], names) == set(names[len(small) : -2])


@pytest.mark.parametrize("size", ["small", "rest"])
def test_each_test_is_in_one_size(size: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/sizes.py", tmp_path)
    (tmp_path / "conftest.py").write_text(
        "import sizes\n"
        "def pytest_addoption(parser): sizes.add_options(parser)\n"
        "def pytest_configure(config): config.pluginmanager.register(sizes.Sizes())\n"
    )
    (tmp_path / "test_two.py").write_text(
        "import pytest\n"
        "def test_fast(): pass  # A-01\n"
        "def test_slow(): pass  # A-01\n"
        "@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])\n"
        "def test_each(strategy): pass\n"
    )
    slow = ["test_slow", "test_each[ddp]", "test_each[fsdp]"]
    (tmp_path / "slow_tests.txt").write_text("".join(f"test_two.py::{name}\n" for name in slow))

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--size", size],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip

    found = [line.split("::")[1] for line in result.stdout.splitlines() if "::" in line]
    assert found == {"small": ["test_fast", "test_each[ddp]", "test_each[fsdp]"], "rest": ["test_slow"]}[size]


@pytest.mark.parametrize(
    ("fails", "closing", "status"),
    [
        ("none", "9 passed, 2 skipped in 17.50s", 0),
        ("test", "1 failed, 9 passed, 2 skipped in 17.50s", 2),
        ("test-rest", "1 failed, 9 passed, 2 skipped in 17.50s", 2),
        ("types", "9 passed, 2 skipped in 17.50s", 2),
    ],
)
def test_ci_sums_up_both_sizes_and_fails_if_either_or_the_type_check_does(
    fails: str, closing: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    make = tmp_path / "make"
    make.write_text(
        "#!/bin/sh\n"
        f'failed=; [ "$2" = {fails} ] && failed="1 failed, "\n'
        'case "$2" in\n'
        'test) echo "=== ${failed}7 passed, 2 skipped, 30 deselected in 12.50s (0:00:12) ===";;\n'
        'test-rest) echo "=== ${failed}2 passed in 5.00s ===";;\n'
        "esac\n"
        '[ -z "$failed" ] || exit 2\n'
    )
    make.chmod(0o755)

    result = subprocess.run(
        [tmp_path / ".ci/run"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True,
    )  # fmt: skip

    assert result.stdout.splitlines()[-1].strip("= ") == closing
    assert result.returncode == status
