"""Strategies that others write: refused where their ranks would train apart, right where one method is written: K-01.

That they give the reference's numbers, and read and write any checkpoint, the parity and checkpoint matrices show.
"""

from __future__ import annotations

import ast
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import TIGHT, Regression, loader, quiet, weights

import averaging
from averaging import Averaging
from drivetrain import Callback, ConfigurationError, Strategy
from drivetrain.strategies import DistributedStrategy
from drivetrain_strategies import SingleDeviceStrategy
from worlds import on_ranks


class Unconnected(Strategy):
    """As one process would be enough: on several, each would train a model of its own."""

    name = "unconnected"

    def setup_module(self, module: Any) -> Any:
        self.module = module
        return operator.call


class LeavesOutTheEnvironment(Averaging):
    def setup_environment(self) -> None:
        pass


class CountsForItself(Averaging):
    @property
    def world_size(self) -> int:
        return 1


def _refused(strategy: Any) -> str:
    module = Regression()
    before = weights(module)
    with pytest.raises(ConfigurationError) as refused:
        quiet(strategy=strategy).fit(module, loader(16, 4))
    assert torch.equal(weights(module), before)
    return str(refused.value)


def _all_refused() -> list[str]:
    return [_refused(kind()) for kind in (Unconnected, LeavesOutTheEnvironment, CountsForItself)]


def test_a_strategy_whose_ranks_do_not_hear_of_each_other_is_refused() -> None:
    # K-01: it trained unconnected runs, gave wrong numbers and ended with code 0
    for rank, (unconnected, left_out, counts) in enumerate(on_ranks(_all_refused, 2)):
        where = f"in a process that is rank {rank} of 2"
        assert f"Unconnected.control is a LocalControl of rank 0 of 1, {where}" in unconnected
        assert "subclass drivetrain.strategies.DistributedStrategy" in unconnected
        assert f"LeavesOutTheEnvironment.control is a LocalControl of rank 0 of 1, {where}" in left_out
        assert f"CountsForItself says that it is rank {rank} of 1, {where}" in counts


def test_one_method_must_be_written() -> None:
    # K-01
    for interface in (Strategy, DistributedStrategy):
        assert interface.__abstractmethods__ == {"setup_module"}


def test_the_third_party_uses_public_names_alone() -> None:
    # K-01
    imported = set()
    for node in ast.walk(ast.parse(Path(averaging.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("drivetrain"):
            imported.add(node.module)
    assert imported == {"drivetrain.strategies"}


class Unfreezes(Callback):
    """The first epoch trains the last layer, the second everything."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.net[0].requires_grad_(trainer.current_epoch > 0)


def _unfrozen(strategy: Any, batch_size: int) -> Any:
    module = Regression()
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    trainer = quiet(strategy=strategy, max_epochs=2, callbacks=Unfreezes())
    trainer.fit(module, loader(32, batch_size))
    return weights(module)


def _on_a_rank() -> Any:
    return _unfrozen(Averaging(), 4)


def test_what_trains_may_change() -> None:
    # I-03
    expected = _unfrozen(SingleDeviceStrategy(), 8)
    for found in on_ranks(_on_a_rank, 2):
        torch.testing.assert_close(found, expected, **TIGHT)
