"""Values of an unfinished epoch survive a checkpoint: its means continue after a resume (F-12, F-16, I-16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from drivetrain._metrics import MetricStore  # private: resumes on fewer ranks, without starting ranks
from drivetrain.errors import CheckpointError, ConfigurationError


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.BinaryAccuracy()
        self.seen = torchmetrics.CatMetric()


def log(store: MetricStore, name: str, value: Any, reduce_fx: Any = "mean", on_step: bool = True) -> None:
    store.record(name, value, on_step, True, True, True, reduce_fx, None, None, True, None)


def log_step(store: MetricStore, module: Metrics, number: int) -> None:
    store.batch, store.samples, store.had_data = (torch.zeros(number + 1),), number + 1, True
    log(store, "loss", torch.tensor(float(number)))
    log(store, "largest", float(-number), "max")
    log(store, "tokens", number, "sum")
    module.accuracy.update(torch.tensor([0.2, 0.8]), torch.tensor([number % 2, 1]))
    module.seen.update(torch.tensor([float(number)]))
    log(store, "accuracy", module.accuracy, on_step=False)
    if number == 0:
        log(store, "once", 3.0, on_step=False)


def store_after(steps: range, *states: Any) -> tuple[MetricStore, Metrics]:
    """Return a store after some steps of an epoch, which continues that of ``states`` if any, and its module."""
    module = Metrics()
    store = MetricStore(module)
    if states:
        store.load_state_dict(list(states), torch.device("cpu"))
    store.enter("train", reset=not states)
    for number in steps:
        log_step(store, module, number)
    return store, module


def test_a_key_keeps_its_reduction_after_a_resume() -> None:
    store, _ = store_after(range(1))
    log(store, "longest", 2.0, torch.max)
    resumed, _ = store_after(range(1, 2), store.state_dict())
    log(resumed, "longest", 1.0, torch.max)
    with pytest.raises(ConfigurationError, match=r"'sum', None\), and with .* before"):
        log(resumed, "longest", 1.0, "sum")
    assert float(resumed.reduce_epoch("the end")[0]["longest_epoch"]) == 2.0


@pytest.mark.parametrize("ranks", [[range(3)], [range(2), range(2, 4)]], ids=["one", "two"])
def test_an_epoch_of_several_ranks_continues_on_one(ranks: list[range]) -> None:  # F-02, F-16
    undisturbed, _ = store_after(range(5))
    states = [store_after(steps)[0].state_dict() for steps in ranks]
    resumed, module = store_after(range(ranks[-1].stop, 5), *states)
    assert resumed.callback_metrics() == undisturbed.callback_metrics()
    assert resumed.had_data
    expected, _ = undisturbed.reduce_epoch("the end")
    assert resumed.reduce_epoch("the end") == (expected, 0)
    assert set(expected) == {"loss_epoch", "largest_epoch", "tokens_epoch", "accuracy", "once"}
    assert torch.equal(module.seen.compute(), torch.arange(5.0))


def resumed_metric(kind: Any, updates: list[Any]) -> Any:
    """Return a metric that replaces those of as many ranks as there are ``updates``; None is a rank without data."""
    states = []
    for update in updates:
        module: Any = nn.ModuleDict({"metric": kind()})
        if update is not None:
            module["metric"].update(*update)
        states.append(MetricStore(module).state_dict())
    resumed = nn.ModuleDict({"metric": kind()})
    MetricStore(resumed).load_state_dict(states, torch.device("cpu"))
    return resumed["metric"]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_state_of_the_only_rank_with_data_needs_no_merge(rank: int) -> None:  # I-16
    first, second = torch.randn(2, 2, 7, generator=torch.Generator().manual_seed(0))
    metric = resumed_metric(torchmetrics.PearsonCorrCoef, [tuple(first) if at == rank else None for at in range(3)])
    metric.update(*second)
    expected = torch.corrcoef(torch.cat([first, second], 1))[0, 1]
    assert float(metric.compute()) == pytest.approx(float(expected), abs=1e-6)
    assert resumed_metric(torchmetrics.PearsonCorrCoef, [None, None]).update_count == 0


class ReductionMetric(torchmetrics.Metric):
    """Has one state for each way in which torchmetrics reduces over ranks."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("sum", "mean", "max", "min"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx=name)
        self.add_state("cat", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("list", [], dist_reduce_fx="cat")
        self.add_state("apart", [], dist_reduce_fx=None)
        self.add_state("spread", torch.tensor(0.0), dist_reduce_fx=lambda values: values.amax(0) - values.amin(0))

    def update(self: Any, value: float) -> None:
        for name in ("sum", "mean", "max", "min", "spread"):
            setattr(self, name, getattr(self, name) + value)
        self.cat = torch.cat([self.cat, torch.full((int(value),), value)])
        self.list.append(torch.tensor([value]))
        self.apart.append(torch.tensor([value]))

    def compute(self: Any) -> Any:
        return self.sum


def test_every_state_is_merged_by_its_reduction() -> None:  # I-16
    metric = resumed_metric(ReductionMetric, [(1.0,), (2.0,), (6.0,)])
    assert [float(getattr(metric, name)) for name in ("sum", "mean", "max", "min", "spread")] == [9, 3, 6, 1, 5]
    assert metric.cat.tolist() == [1.0] + [2.0] * 2 + [6.0] * 6
    assert [float(part) for part in metric.list] == [float(part) for part in metric.apart] == [1, 2, 6]
    assert metric.update_count == 3


class FailsToMerge(torchmetrics.SumMetric):
    def merge_state(self, incoming_state: Any) -> None:
        raise KeyError("half")


class ChangesShape(torchmetrics.SumMetric):
    """Has a state of as many numbers as its last update, which cannot be summed up."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("wide", torch.zeros(0), dist_reduce_fx="sum")

    def update(self, value: Any) -> None:
        super().update(value)
        self.wide = torch.zeros(len(value))


def test_a_metric_that_cannot_be_merged_is_named() -> None:  # I-16
    for kind, reason in ((FailsToMerge, "KeyError: 'half'"), (ChangesShape, "stack expects")):
        with pytest.raises(CheckpointError, match=rf"{kind.__name__} 'metric'(?s:.)*{reason}"):
            resumed_metric(kind, [(torch.ones(1),), (torch.ones(2),)])
