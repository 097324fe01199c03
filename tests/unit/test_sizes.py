"""The sizes of the suite: the rule that decides, and the closing line of both."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sizes import Shown, small_tests

ROOT = Path(__file__).parents[2]


def _test(name: str, *behaviours: str, setups: tuple[str, ...] = ()) -> Shown:
    return Shown(f"tests/test_a.py::{name}", frozenset(behaviours), frozenset(setups))


def _small(tests: list[Shown], *slow: str) -> list[str]:
    names = small_tests(tests, [f"tests/test_a.py::{name}" for name in slow])
    return sorted(name.split("::")[1] for name in names)


def test_a_fast_test_is_small() -> None:
    assert _small([_test("fast"), _test("slow")], "slow") == ["fast"]


def test_a_slow_test_is_small_if_it_alone_shows_a_behaviour() -> None:
    tests = [_test("fast", "A-01"), _test("covered", "A-01"), _test("first", "A-01", "B-02"), _test("second", "B-02")]

    assert _small(tests, "covered", "first", "second") == ["fast", "first"]


def test_a_slow_test_is_small_if_it_alone_shows_a_strategy_or_precision_in_its_file() -> None:
    tests = [
        _test("ddp", setups=("ddp", "32-true")),
        _test("fsdp", setups=("fsdp", "32-true")),
        _test("bf16", setups=("ddp", "bf16-mixed")),
        _test("fsdp_bf16", setups=("fsdp", "bf16-mixed")),
    ]

    assert _small(tests, "fsdp", "bf16", "fsdp_bf16") == ["bf16", "ddp", "fsdp"]


def test_a_file_of_slow_tests_has_a_small_one() -> None:
    assert _small([_test("one"), _test("two")], "one", "two") == ["one"]


def test_the_matrix_of_parity_is_small() -> None:
    matrix = Shown("tests/parity/test_parity.py::test_weights[ddp]")

    assert small_tests([matrix, Shown(f"{matrix.nodeid}2")], [matrix.nodeid]) == {matrix.nodeid, f"{matrix.nodeid}2"}


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
    ],
)
def test_ci_sums_up_both_sizes_and_fails_if_either_does(fails: str, closing: str, status: int, tmp_path: Path) -> None:
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
