"""Starts a strategy's processes once for all of its tests, and records the results for the matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from parity_runs import Results, run
from parity_strategies import STRATEGIES, Candidate

BY_NAME = {candidate.name: candidate for candidate in STRATEGIES}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "row(name, shows): the line of the parity matrix that a test is part of")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))  # the first of a strategy's tests waits for all of its runs


@pytest.fixture(scope="session")
def results() -> Callable[[Candidate, int], Results]:
    """Return the results of a strategy on a number of ranks; the first test that requests them starts the processes."""
    by_name = cache(lambda name, ranks: run(BY_NAME[name], ranks))
    return lambda candidate, ranks: by_name(candidate.name, ranks)
