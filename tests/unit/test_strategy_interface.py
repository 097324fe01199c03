"""The table of a strategy's interface in docs/extending.md lists exactly what the code has."""

from __future__ import annotations

import itertools
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import DistributedStrategy, Strategy
from drivetrain.strategies.strategy import (
    StrategyCollectives,
    StrategyLifecycle,
    StrategyOptimization,
    StrategyPlacement,
    StrategyState,
)
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
GROUPS = {
    "lifecycle": StrategyLifecycle,
    "optimization": StrategyOptimization,
    "collectives": StrategyCollectives,
    "checkpoint state": StrategyState,
    "placement": StrategyPlacement,
}


def listed(heading: str) -> list[str]:
    """Return the names in the row of the table that begins with ``heading``."""
    rows = re.findall(rf"^\| {re.escape(heading)} \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) == 1, f"one row {heading!r} in {PAGE.name}"
    return re.findall(r"`(\w+)`", rows[0])


def is_final(member: Any) -> bool:
    return bool(getattr(member.fget if isinstance(member, property) else member, "__final__", False))


def members(owner: type, final: bool) -> list[str]:
    """Return the public methods and properties that the class itself defines, in the order of the file."""
    return [
        name
        for name, member in vars(owner).items()
        if not name.startswith("_") and (callable(member) or isinstance(member, property)) and is_final(member) is final
    ]


def test_what_must_be_defined_is_abstract() -> None:
    assert listed("Must be defined") == sorted(Strategy.__abstractmethods__) == members(Strategy, final=False)
    assert Strategy.__abstractmethods__ == DistributedStrategy.__abstractmethods__


@pytest.mark.parametrize("group", GROUPS)
def test_what_may_be_overridden_is_what_the_group_defines(group: str) -> None:
    assert sorted(listed(f"May be overridden: {group}")) == sorted(members(GROUPS[group], final=False))


def test_what_is_provided_is_final() -> None:
    final = [name for owner in Strategy.__mro__ for name in members(owner, final=True)]
    assert sorted(listed("Provided, final")) == sorted(final)


def test_every_public_method_is_in_one_row() -> None:
    rows = ["Must be defined", *(f"May be overridden: {group}" for group in GROUPS), "Provided, final"]
    attributes = {name: getattr(Strategy, name) for name in dir(Strategy) if not name.startswith("_")}
    public = [name for name, value in attributes.items() if callable(value) or isinstance(value, property)]
    assert sorted(name for row in rows for name in listed(row)) == sorted(public)


@pytest.mark.parametrize("value", ["60", -1.0, 0, True, float("nan"), float("inf"), timedelta(0)])
def test_an_invalid_timeout_is_refused_by_name(value: Any) -> None:
    # S-17
    for strategy, name in itertools.product(
        (DDPStrategy, FSDPStrategy, DeepSpeedStrategy), ("timeout", "step_timeout")
    ):
        with pytest.raises(ConfigurationError, match=f"{name}={re.escape(repr(value))} is not a timeout"):
            strategy(**{name: value})


def test_a_timeout_may_be_seconds() -> None:
    # S-17
    assert DDPStrategy(timeout=60.0)._group.timeout == DDPStrategy(timeout=timedelta(minutes=1))._group.timeout
