"""NonFiniteGuard and ReplicaCheck: what they find, what they allow, and when. Causes: tests/distributed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError, DistributedError, NonFiniteError
from drivetrain.callbacks import LambdaCallback, NonFiniteGuard, ReplicaCheck
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks

INF, NAN = math.inf, math.nan
WINDOW = {"accumulate_grad_batches": 2}


class Bad(Regression):
    """Adds a value to the loss of some micro-batches, and counts micro-batches and validated batches."""

    def __init__(self, bad: dict[int, float]) -> None:
        super().__init__()
        self.bad = bad
        self.trained = 0
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        return self.loss(batch) + self.bad.get(self.trainer.micro_batches, 0.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1


@pytest.mark.parametrize(
    ("bad", "every", "options", "found", "trained"),
    [
        pytest.param({7: NAN, 8: INF}, 5, {}, "nan on rank 0 at batch index 7 of epoch 0, after 7", 10, id="nan"),
        pytest.param({7: INF, 8: NAN}, 5, {}, "inf on rank 0 at batch index 7 of epoch 0, after 7", 10, id="inf"),
        pytest.param({7: -INF}, 5, {}, "-inf on rank 0 at batch index 7 of epoch 0, after 7", 10, id="-inf"),
        pytest.param({1: NAN}, 1, {}, "nan on rank 0 at batch index 1 of epoch 0, after 1", 2, id="after each step"),
        pytest.param({6: INF}, 1, WINDOW, "inf on rank 0 at batch index 6 of epoch 0, after 3", 8, id="in a window"),
        pytest.param({27: NAN}, 4, WINDOW, "nan on rank 0 at batch index 7 of epoch 1, after 13", 28, id="next epoch"),
        pytest.param({19: NAN}, 50, {}, "nan on rank 0 at batch index 19 of epoch 0", 20, id="an epoch's end"),
        pytest.param({3: NAN}, 50, {"max_steps": 5}, "nan on rank 0 at batch index 3", 5, id="the run's end"),
    ],
)
def test_the_first_bad_loss_is_named(bad: Any, every: int, options: Any, found: str, trained: int) -> None:  # G-05
    module = Bad(bad)
    with pytest.raises(NonFiniteError, match=f"The loss is {found} ?(optimizer steps)?"):
        quiet_fit(max_epochs=2, callbacks=NonFiniteGuard(every), **options).fit(module, loader(80), loader(4))
    assert module.trained == trained
    assert module.validated == (trained > 20)  # not with the weights after a bad loss


def test_a_window_longer_than_its_memory_is_checked_in_between() -> None:
    module = Bad({300: NAN})
    with pytest.raises(NonFiniteError, match="batch index 300"):
        quiet_fit(callbacks=NonFiniteGuard(1000), accumulate_grad_batches=600).fit(module, loader(600, 1))
    assert module.trained == 512


def test_in_manual_optimization_every_backward_is_watched() -> None:  # G-05, B-13
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for bad in (0.0, INF if batch_idx == 4 else 0.0):
                self.manual_backward(self.loss(batch) + 3e38 + bad)  # the sum of both is not finite in float32
            optimizer.step()

    with pytest.raises(NonFiniteError, match=r"loss is inf on rank 0 at batch index 4 .*after 4 optimizer steps"):
        quiet_fit(callbacks=NonFiniteGuard()).fit(Manual(), loader())


def test_gradients_are_watched_before_they_are_clipped_where_asked() -> None:  # G-05
    class Exploding(Regression):
        def on_after_backward(self) -> None:
            if self.trainer.micro_batches in (3, 4):
                self.net.weight.grad[0, 1] = INF if self.trainer.micro_batches == 3 else NAN  # type: ignore[index]

    quiet_fit(callbacks=NonFiniteGuard(), limit_train_batches=4).fit(Exploding(), loader())
    guard = NonFiniteGuard(check_gradients=True)
    with pytest.raises(NonFiniteError, match="A gradient is inf on rank 0 at batch index 3"):
        quiet_fit(gradient_clip_val=1.0, callbacks=guard).fit(Exploding(), loader())
    with pytest.raises(ConfigurationError, match="16-mixed"):  # a loss scaler's gradients overflow
        quiet_fit(precision="16-mixed", callbacks=guard).fit(Regression(), loader())


def test_parameters_are_watched_where_asked() -> None:
    module = Regression()
    module.unused = torch.nn.Parameter(torch.tensor([1.0, NAN]))
    quiet_fit(callbacks=NonFiniteGuard()).fit(module, loader())
    with pytest.raises(NonFiniteError, match="parameter 'unused' is not finite on rank 0 at batch index 9"):
        quiet_fit(callbacks=NonFiniteGuard(check_parameters=True)).fit(module, loader())


def test_a_batch_without_items_may_have_no_loss() -> None:  # B-21
    class Weighed(Regression):
        def batch_weight(self, batch: Any) -> torch.Tensor:
            return (batch[1] > 0).sum()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            items = (y > 0).squeeze(1)
            return (self.net(x) - y)[items].square().mean()  # NaN where there are none

    x, y = torch.ones(16, 4), torch.ones(16, 1)
    y[4:8] = -1
    module = Weighed()
    guard = NonFiniteGuard(check_gradients=True)
    quiet_fit(accumulate_grad_batches=2, callbacks=guard).fit(module, DataLoader(TensorDataset(x, y), batch_size=4))
    assert module.net.weight.isfinite().all()


def _found_on_ranks(bad_by_rank: dict[int, dict[int, float]]) -> str:
    class BadOnRanks(Bad):
        def on_fit_start(self) -> None:
            self.bad = bad_by_rank.get(self.global_rank, {})

    fit = quiet_fit(strategy="ddp", devices=2, callbacks=NonFiniteGuard(every_n_steps=4))
    try:
        fit.fit(BadOnRanks({}), loader(64))
    except NonFiniteError as error:
        return f"{error.what} [{fit.global_step}]"
    return ""


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({1: {2: NAN}}, "rank 1 at batch index 2 of epoch 0, after 2 optimizer steps (global_step=2) [4]"),
        ({0: {6: NAN}, 1: {5: NAN}}, "rank 1 at batch index 5 of epoch 0, after 5 optimizer steps (global_step=5) [8]"),
        ({0: {1: NAN}, 1: {1: INF}}, "ranks 0, 1 at batch index 1 of epoch 0, after 1 optimizer steps"),
        ({}, ""),
    ],
)
def test_every_rank_stops_at_once_and_names_the_rank(bad: dict[int, dict[int, float]], found: str) -> None:
    # G-05, G-01: no rank hangs
    first, second = on_ranks(_found_on_ranks, 2, bad, process_group=None)
    assert first == second
    assert found in first
    assert bool(first) is bool(bad)


class Still(Regression):
    """Keeps its weights, and has statistics of each rank's data, which may differ until the next forward."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(self.norm(x)) - y).square().mean()


def _change(module: Any, change: str) -> None:
    with torch.no_grad():
        if change == "extra":
            module.register_buffer("extra", torch.zeros(1))
        elif change == "all":
            for parameter in module.parameters():
                parameter += 1
        else:
            tensor = module.scale if change == "scale" else module.norm.weight
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            value = local.view(-1)[0]
            local.view(-1)[0] = torch.nextafter(value, torch.tensor(9.0))  # the last bit


def _found(strategy: str, change: str, step: int, rank: int, options: dict[str, Any]) -> str:
    """Change a tensor of one rank after a step, and return the error."""

    def change_one_rank(trainer: Any, module: Any, *arguments: Any) -> None:
        if trainer.global_step == step and trainer.global_rank == rank:
            _change(module, change)

    changing = LambdaCallback(on_train_batch_end=change_one_rank, priority=200)  # before the check
    chosen: Any = FSDPStrategy(sharding="hybrid", replicate_size=2) if strategy == "hsdp" else strategy
    ranks, callbacks = torch.distributed.get_world_size(), [changing, ReplicaCheck(**options)]
    try:
        quiet_fit(strategy=chosen, devices=ranks, max_steps=5, callbacks=callbacks).fit(Still(), loader(80))
    except DistributedError as error:
        return error.what
    return ""


TWO = {"every_n_steps": 2}
WEIGHT = "parameter 'norm.weight' is not the same on"


@pytest.mark.parametrize(
    ("strategy", "ranks", "change", "step", "rank", "options", "found"),
    [
        pytest.param("ddp", 2, "", 0, 0, TWO, "", id="none"),
        pytest.param("ddp_static_graph", 2, "", 0, 0, TWO, "", id="none, with a static graph"),
        pytest.param("ddp", 4, "weight", 3, 1, TWO, f"step 4: {WEIGHT} ranks 0, 2, 3 and on rank 1", id="the last bit"),
        pytest.param("ddp", 2, "weight", 3, 0, {}, f"step 5: {WEIGHT} rank 0 and on rank 1", id="at the end"),
        pytest.param("ddp", 2, "scale", 4, 0, TWO, "step 4: buffer 'scale' is not the same on rank 0", id="a buffer"),
        pytest.param("ddp", 2, "scale", 4, 0, {**TWO, "buffers": False}, "", id="a buffer, not compared"),
        pytest.param("ddp", 2, "all", 4, 0, TWO, "rank 1 (the first of 4 that differ)", id="several"),
        pytest.param("ddp", 2, "all", 4, 0, {**TWO, "ignore": ["net.*"]}, "parameter 'norm.weight'", id="some ignored"),
        pytest.param("ddp", 2, "all", 4, 0, {**TWO, "ignore": ["*"]}, "", id="all ignored"),
        pytest.param("ddp", 2, "extra", 4, 1, TWO, "buffer 'extra': missing on rank(s) [0]", id="names"),
        pytest.param("hsdp", 4, "", 0, 0, TWO, "", id="none of shards"),
        pytest.param("hsdp", 4, "weight", 3, 3, TWO, f"step 4: {WEIGHT} rank 1 and on rank 3", id="shards"),
    ],
)
def test_replicas_are_compared(
    strategy: str, ranks: int, change: str, step: int, rank: int, options: dict[str, Any], found: str
) -> None:  # C-04, B-20
    results = on_ranks(_found, ranks, strategy, change, step, rank, options)
    assert len(set(results)) == 1  # the same on every rank
    assert found in results[0]
    assert bool(found) is bool(results[0])
