"""The two sizes of the suite: which tests `make test` runs, and which `make test-rest` adds.

One rule decides. A test that is not in ``slow_tests.txt`` is small. A test that is in it is small only if it shows
something that neither a fast test nor a small one before it shows:

- a guaranteed behaviour, whose id its source cites (`A-07`);
- a strategy or a precision, by one of its parameters, with the feature that its file is about;
- the feature of its file at all.

Tests of a strategy in the matrix of parity share a start of processes. They are small, except on four processes if a
test before them has the same strategy and feature.

``slow_tests.txt`` has the tests that took at least `SLOW` seconds when `make durations` last ran.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SLOW = 1.0
"""Seconds from which on a test is slow, with its set-up and teardown, on two cores with two workers."""

SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
MATRIX = "tests/parity/"
SIZES = ("fast", "small", "rest", "all")

_BEHAVIOUR = re.compile(r"\b[A-S]-\d\d\b")
_CELL = re.compile(r"::(\w+)\[([^-]+)-(\d)(?:-(.+)-(?:bf16|\d\d)-(?:true|mixed))?\]$")
"""A test of the matrix: its name, the strategy, the number of processes, and the feature if it trains."""
_SETUP = re.compile(r"(single|ddp|fsdp|hsdp|hybrid|zero|deepspeed|tensor_parallel)\w*|(bf16|16|32|64)-(mixed|true)")


@dataclass(frozen=True)
class Shown:
    """A test, and what it shows.

    Attributes:
        nodeid: pytest's name of the test.
        behaviours: ids of the guaranteed behaviours that its source cites.
        setups: strategies and precisions among its parameters.
    """

    nodeid: str
    behaviours: frozenset[str] = frozenset()
    setups: frozenset[str] = frozenset()

    @property
    def file(self) -> str:
        """The file of the test, from the root of the repository."""
        return self.nodeid.split("::")[0]

    @property
    def cell(self) -> re.Match[str] | None:
        """The match of a test of one strategy in the matrix of parity."""
        return _CELL.search(self.nodeid) if self.file.startswith(MATRIX) else None

    def evidence(self) -> Iterator[tuple[str, ...]]:
        """Yield everything that the test shows."""
        if self.cell:
            test, strategy, _, feature = self.cell.groups()
            yield (test, strategy, feature)
            return
        yield (self.file,)
        for behaviour in self.behaviours:
            yield (behaviour,)
        for setup in self.setups:
            yield (self.file, setup)


def small_tests(tests: Sequence[Shown], slow: Iterable[str]) -> set[str]:
    """Return the names of the small tests among ``tests``, by the rule at the top of this file."""
    slow = {name for name in slow if not name.startswith(MATRIX)}
    slow |= {test.nodeid for test in tests if test.cell and test.cell[3] == "4"}
    small = {test.nodeid for test in tests if test.nodeid not in slow}
    shown = {evidence for test in tests if test.nodeid in small for evidence in test.evidence()}
    for test in tests:
        if test.nodeid not in small and not shown.issuperset(test.evidence()):
            small.add(test.nodeid)
            shown.update(test.evidence())
    return small


def slow_tests() -> list[str]:
    """Return the names of the slow tests."""
    return SLOW_TESTS.read_text().splitlines()


@cache
def _behaviours(function: Any) -> frozenset[str]:
    return frozenset(_BEHAVIOUR.findall(inspect.getsource(function)))


def _shown(item: pytest.Item) -> Shown:
    function = getattr(item, "function", None)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return Shown(
        item.nodeid,
        _behaviours(inspect.unwrap(function)) if function is not None else frozenset(),
        frozenset(filter(_SETUP.fullmatch, (str(getattr(value, "name", value)) for value in parameters))),
    )


class Sizes:
    """The pytest plugin behind ``--size`` and ``--write-slow-tests``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        size = config.getoption("size")
        if size == "all":
            return
        slow = set(slow_tests())
        small = small_tests([_shown(item) for item in items], slow)
        belongs = {
            "fast": lambda name: name not in slow,
            "small": lambda name: name in small,
            "rest": lambda name: name not in small,
        }[size]
        config.hook.pytest_deselected(items=[item for item in items if not belongs(item.nodeid)])
        items[:] = [item for item in items if belongs(item.nodeid)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if session.config.getoption("write_slow_tests") and not is_worker:
            slow = sorted(name for name, seconds in self.seconds.items() if seconds >= SLOW)
            SLOW_TESTS.write_text("".join(f"{name}\n" for name in slow))


def add_options(parser: pytest.Parser) -> None:
    """Declare the options of `Sizes`."""
    parser.addoption("--size", choices=SIZES, default="all", help="tests to run; fast: not in slow_tests.txt")
    parser.addoption("--write-slow-tests", action="store_true", help="write the tests that took long to slow_tests.txt")
