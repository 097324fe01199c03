"""Values of an unfinished epoch survive a checkpoint: its means continue after a resume (F-12, F-16, I-16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from drivetrain._metrics import MetricStore  # private: resumes on fewer ranks, without starting ranks
from drivetrain.errors import CheckpointError, ConfigurationError

CPU = torch.device("cpu")


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.seen = torchmetrics.CatMetric()


def entered(module: Module) -> MetricStore:
    store = MetricStore(module)
    store.enter("train")
    return store


def log(store: MetricStore, name: str, value: Any, reduce_fx: Any = "mean", **options: Any) -> None:
    named = {"on_step": True, "on_epoch": True, "sync_dist": None, **options}
    store.record(
        name, value, named["on_step"], named["on_epoch"], True, True, reduce_fx, None, named["sync_dist"], True, None
    )


def step(store: MetricStore, module: Module, number: int) -> None:
    store.batch, store.samples, store.had_data = (torch.zeros(number + 1),), number + 1, True
    log(store, "loss", torch.tensor(float(number)))
    log(store, "largest", float(-number), "max")
    log(store, "tokens", number, "sum")
    module.accuracy.update(torch.tensor([0.2, 0.8]), torch.tensor([number % 2, 1]))
    module.seen.update(torch.tensor([float(number)]))
    log(store, "accuracy", module.accuracy, on_step=False)
    if number == 0:
        log(store, "once", 3.0, on_step=False)


def test_a_key_keeps_its_reduction_after_a_resume() -> None:
    module = Module()
    store, resumed = entered(module), MetricStore(module)
    store.batch = (torch.zeros(1),)
    log(store, "largest", 2.0, torch.max)
    resumed.load_state_dict([store.state_dict()], CPU)
    resumed.enter("train", reset=False)
    resumed.batch = (torch.zeros(1),)
    log(resumed, "largest", 1.0, torch.max)
    with pytest.raises(ConfigurationError, match=r"reduce_fx from .* to 'sum'"):
        log(resumed, "largest", 1.0, "sum")
    assert float(resumed.reduce_epoch(together=False)["largest_epoch"]) == 2.0


@pytest.mark.parametrize("ranks", [[range(3)], [range(2), range(2, 4)]], ids=["one", "two"])
def test_an_epoch_goes_on_in_place_of_several_ranks(ranks: list[range]) -> None:
    # F-02, F-16: a resume on as many ranks, and on fewer
    whole = Module()
    undisturbed = entered(whole)
    for number in range(5):
        step(undisturbed, whole, number)
    states = []
    for numbers in ranks:
        module = Module()
        store = entered(module)
        for number in numbers:
            step(store, module, number)
        states.append(store.state_dict())
    second = Module()
    resumed = MetricStore(second)
    resumed.load_state_dict(states, CPU)
    resumed.enter("train", reset=False)
    for number in range(ranks[-1].stop, 5):
        step(resumed, second, number)
    assert resumed.callback_metrics() == undisturbed.callback_metrics()
    assert resumed.had_data
    expected = undisturbed.reduce_epoch(together=False)
    assert resumed.reduce_epoch(together=False) == expected
    assert set(expected) == {"loss_epoch", "largest_epoch", "tokens_epoch", "accuracy", "once"}
    assert torch.equal(second.seen.compute(), torch.arange(5.0))


def _pairs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    first = torch.randn(7 + rank, generator=generator) + 3 * rank
    return first, first * (-1) ** rank + torch.randn(7 + rank, generator=generator)


class Correlating(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.metric = kind()


def _resumed(kind: Any, updates: list[Any]) -> Correlating:
    """Return a module that replaces as many ranks as there are ``updates``; a rank with None had no data."""
    states = []
    for update in updates:
        module = Correlating(kind)
        if update is not None:
            module.metric.update(*update)
        states.append(MetricStore(module).state_dict())
    resumed = Correlating(kind)
    MetricStore(resumed).load_state_dict(states, CPU)
    return resumed


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_state_of_one_rank_alone_needs_no_merge(at: int) -> None:
    # I-16
    assert _resumed(torchmetrics.PearsonCorrCoef, [None, None]).metric.update_count == 0  # between epochs
    resumed = _resumed(torchmetrics.PearsonCorrCoef, [_pairs(0) if rank == at else None for rank in range(3)])
    resumed.metric.update(*_pairs(1))
    expected = torch.corrcoef(torch.stack([torch.cat([_pairs(0)[side], _pairs(1)[side]]) for side in (0, 1)]))[0, 1]
    assert float(resumed.metric.compute()) == pytest.approx(float(expected), abs=1e-6)


class Reducing(torchmetrics.Metric):
    """Has one state for each way in which torchmetrics reduces over ranks."""

    sum: torch.Tensor
    cat: torch.Tensor
    list: Any
    apart: Any

    def __init__(self) -> None:
        super().__init__()
        for name in ("sum", "mean", "max", "min"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx=name)
        self.add_state("cat", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("list", [], dist_reduce_fx="cat")
        self.add_state("apart", [], dist_reduce_fx=None)
        self.add_state("spread", torch.tensor(0.0), dist_reduce_fx=lambda values: values.amax(0) - values.amin(0))

    def update(self, value: float) -> None:
        for name in ("sum", "mean", "max", "min", "spread"):
            setattr(self, name, getattr(self, name) + value)
        self.cat = torch.cat([self.cat, torch.full((int(value),), value)])
        self.list.append(torch.tensor([value]))
        self.apart.append(torch.tensor([value]))

    def compute(self) -> torch.Tensor:
        return self.sum


def test_every_other_state_is_merged_as_compute_would() -> None:
    # I-16: by all ranks at once; the mean of a mean and a third is another number
    metric = _resumed(Reducing, [(1.0,), (2.0,), (6.0,)]).metric
    assert [float(getattr(metric, name)) for name in ("sum", "mean", "max", "min", "spread")] == [9, 3, 6, 1, 5]
    assert metric.cat.tolist() == [1.0] + [2.0] * 2 + [6.0] * 6
    assert [float(part) for part in metric.list] == [float(part) for part in metric.apart] == [1, 2, 6]
    assert metric.update_count == 3


class FailsToMerge(torchmetrics.SumMetric):
    def merge_state(self, incoming_state: Any) -> None:
        raise KeyError("half")


class Growing(torchmetrics.SumMetric):
    """Has a state of as many numbers as its last update, which cannot be summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("wide", torch.zeros(0), dist_reduce_fx="sum")

    def update(self, value: Any) -> None:
        super().update(value)
        self.wide = torch.zeros(len(value))


@pytest.mark.parametrize(
    ("kind", "named"),
    [(FailsToMerge, r"FailsToMerge 'metric'(?s:.)*KeyError: 'half'"), (Growing, r"Growing 'metric'(?s:.)*wide")],
)
def test_a_merge_that_fails_is_named(kind: Any, named: str) -> None:
    # I-16
    with pytest.raises(CheckpointError, match=named):
        _resumed(kind, [(torch.ones(1),), (torch.ones(2),)])
