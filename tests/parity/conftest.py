"""Starts a strategy's processes once for all of its tests, and records the results for the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

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
def results(request: pytest.FixtureRequest) -> Callable[[Candidate, int], Results]:
    """Return the results of a strategy on a number of ranks; the first test that requests them starts the processes.

    They train the jobs of the tests that were selected, in the order of `Candidate.jobs`.
    """
    cells = [cell for item in request.session.items if (cell := _parameters(item).get("cell"))]
    selected = {(cell.candidate.name, cell.ranks, cell.job) for cell in cells}

    @cache
    def by_name(name: str, ranks: int) -> Results:
        candidate = BY_NAME[name]
        return run(candidate, ranks, [job for job in candidate.jobs(ranks) if (name, ranks, job) in selected])

    return lambda candidate, ranks: by_name(candidate.name, ranks)


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}
