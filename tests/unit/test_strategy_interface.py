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


def test_every_public_method_is_in_the_row_of_what_is_required_may_be_overridden_or_is_final() -> None:
    assert listed("Must be defined") == sorted(Strategy.__abstractmethods__) == members(Strategy, final=False)
    assert Strategy.__abstractmethods__ == DistributedStrategy.__abstractmethods__
    for group, owner in GROUPS.items():
        assert sorted(listed(f"May be overridden: {group}")) == sorted(members(owner, final=False))
    final = [name for owner in Strategy.__mro__ for name in members(owner, final=True)]
    assert sorted(listed("Provided, final")) == sorted(final)
    rows = ["Must be defined", *(f"May be overridden: {group}" for group in GROUPS), "Provided, final"]
    attributes = {name: getattr(Strategy, name) for name in dir(Strategy) if not name.startswith("_")}
    public = [name for name, value in attributes.items() if callable(value) or isinstance(value, property)]
    assert sorted(name for row in rows for name in listed(row)) == sorted(public)


def test_a_timeout_may_be_seconds_and_an_invalid_one_is_refused_by_name() -> None:  # S-17
    strategies = (DDPStrategy, FSDPStrategy, DeepSpeedStrategy)
    values = ["60", -1.0, 0, True, float("nan"), float("inf"), timedelta(0)]
    for strategy, name, value in itertools.product(strategies, ("timeout", "step_timeout"), values):
        with pytest.raises(ConfigurationError, match=f"{name}={re.escape(repr(value))} is not a timeout"):
            strategy(**{name: value})  # type: ignore[arg-type]
    assert DDPStrategy(timeout=60.0)._group.timeout == DDPStrategy(timeout=timedelta(minutes=1))._group.timeout
