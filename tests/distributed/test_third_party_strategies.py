"""Third-party strategies: refused if their ranks would train separately, correct if one method is overridden (K-01).

The parity and checkpoint matrices show that they give the reference's numbers, and read and write any checkpoint.
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
    """Written as for one process: on several, each would train a model of its own."""

    name = "unconnected"

    def setup_module(self, module: Any) -> Any:
        self.module = module
        return operator.call


class LeavesOutTheEnvironment(Averaging):
    def setup_environment(self) -> None:
        pass


class CountsForItself(Averaging):
    @property  # type: ignore[misc]  # final: type checkers refuse this override as well
    def world_size(self) -> int:
        return 1


def _refused(strategy: Any, module: Any = None) -> str:
    module = Regression() if module is None else module
    before = weights(module)
    with pytest.raises(ConfigurationError) as refused:
        quiet(strategy=strategy).fit(module, loader(16, 4))
    assert torch.equal(weights(module), before)
    return str(refused.value)


def _all_refused() -> list[str]:
    return [_refused(kind()) for kind in (Unconnected, LeavesOutTheEnvironment, CountsForItself)]


def test_a_strategy_with_unconnected_ranks_is_refused() -> None:
    # K-01: previously it trained unconnected runs, gave wrong numbers and exited with code 0
    for rank, (unconnected, left_out, counts) in enumerate(on_ranks(_all_refused, 2)):
        where = f"in a process that is rank {rank} of 2"
        assert f"Unconnected.control is a LocalControl of rank 0 of 1, {where}" in unconnected
        assert "subclass drivetrain.strategies.DistributedStrategy" in unconnected
        assert f"LeavesOutTheEnvironment.control is a LocalControl of rank 0 of 1, {where}" in left_out
        assert f"CountsForItself says that it is rank {rank} of 1, {where}" in counts


class KeepsNoModule(Averaging):
    def setup_module(self, module: Any) -> Any:
        return operator.call


class KeepsAWrapper(Averaging):
    def setup_module(self, module: Any) -> Any:
        self.module = torch.nn.Sequential(module)
        return operator.call


class ReturnsNothing(Averaging):
    def setup_module(self, module: Any) -> Any:
        super().setup_module(module)


class ReturnsTheModule(Averaging):
    def setup_module(self, module: Any) -> Any:
        super().setup_module(module)
        return module


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (KeepsNoModule, "KeepsNoModule.setup_module left self.module as None"),
        (KeepsAWrapper, "KeepsAWrapper.setup_module left self.module as a Sequential"),
        (ReturnsNothing, "ReturnsNothing.setup_module returned None"),
        (ReturnsTheModule, "ReturnsTheModule.setup_module returned the module itself"),
    ],
)
def test_an_incomplete_setup_module_is_refused(strategy: Any, said: str) -> None:
    # K-01: previously gradients were not exchanged and the ranks diverged, or a checkpoint had other names
    with pytest.raises(ConfigurationError, match=said):
        quiet(strategy=strategy(), devices=1).fit(Regression(), loader(16, 4))


class WithoutSuper(Averaging):
    def setup_optimizers(self, optimizers: Any) -> Any:
        self.optimizers = list(optimizers)
        return self.optimizers


class Looked(Regression):
    """Has a table that only rank 0 uses, with sparse gradients, and a buffer that each rank counts in."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 1, sparse=True)
        self.register_buffer("steps", torch.zeros(()))
        torch.nn.init.normal_(self.net[0].weight)  # differs between ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank = torch.distributed.get_rank()
        self.steps += 1 + rank
        loss = self.loss(batch)
        return loss + self.table(torch.tensor([1])).sum() if rank == 0 else loss

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class Counts(Callback):
    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.steps.append(float(module.steps))


def _apart() -> Any:
    torch.manual_seed(torch.distributed.get_rank())
    module, counts = Looked(), Counts()
    quiet(strategy=WithoutSuper(), max_epochs=2, callbacks=counts).fit(module, loader(32, 4))
    return module.net[0].weight.detach(), module.table.weight.detach(), counts.steps


def test_ranks_stay_equal_whichever_method_is_overridden() -> None:
    # K-01: setup_optimizers without super, a sparse gradient on one rank alone, a change of what trains
    (net, table, steps), (other_net, other_table, other_steps) = on_ranks(_apart, 2)
    assert torch.equal(net, other_net)
    assert torch.equal(table, other_table)
    assert (steps, other_steps) == ([4.0, 8.0], [8.0, 16.0])  # each rank's own, even after unfreezing


def _with_max_norm() -> str:
    class Bounded(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 1, max_norm=1.0)

    return _refused(Averaging(), Bounded())


def test_replicas_that_would_diverge_are_refused() -> None:
    # K-01
    assert all("'table' is an Embedding with max_norm=1.0, on 2 ranks" in said for said in on_ranks(_with_max_norm, 2))


def test_one_method_must_be_overridden() -> None:
    # K-01
    for interface in (Strategy, DistributedStrategy):
        assert interface.__abstractmethods__ == {"setup_module"}


def test_the_third_party_uses_public_names_only() -> None:
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
