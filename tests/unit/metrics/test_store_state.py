"""Values that are under way survive a checkpoint: an epoch's mean goes on where it stopped (F-12, F-16)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.metrics import MetricStore

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


@pytest.mark.parametrize("stop", [1, 3])
def test_an_epoch_goes_on(stop: int) -> None:
    whole = Module()
    undisturbed = entered(whole)
    for number in range(5):
        step(undisturbed, whole, number)

    first = Module()
    saved = entered(first)
    for number in range(stop):
        step(saved, first, number)
    state = saved.state_dict()

    second = Module()
    resumed = MetricStore(second)
    resumed.load_state_dict([state], CPU)
    resumed.enter("train", reset=False)
    for number in range(stop, 5):
        step(resumed, second, number)
    assert resumed.callback_metrics() == undisturbed.callback_metrics()
    assert resumed.had_data
    expected = undisturbed.reduce_epoch(together=False)
    assert resumed.reduce_epoch(together=False) == expected
    assert set(expected) == {"loss_epoch", "largest_epoch", "tokens_epoch", "accuracy", "once"}
    assert torch.equal(second.seen.compute(), torch.arange(5.0))


def test_a_reduction_given_as_a_function_is_the_same_reduction() -> None:
    module = Module()
    store = entered(module)
    store.batch = (torch.zeros(1),)
    log(store, "largest", 2.0, torch.max)
    resumed = MetricStore(module)
    resumed.load_state_dict([store.state_dict()], CPU)
    resumed.enter("train", reset=False)
    resumed.batch = (torch.zeros(1),)
    log(resumed, "largest", 1.0, torch.max)
    log(resumed, "largest", 0.5, torch.max)
    assert float(resumed.reduce_epoch(together=False)["largest_epoch"]) == 2.0


def test_another_meaning_of_a_key_is_refused_after_a_resume_too() -> None:
    module = Module()
    store = entered(module)
    store.batch = (torch.zeros(1),)
    log(store, "loss", 2.0)
    resumed = MetricStore(module)
    resumed.load_state_dict([store.state_dict()], CPU)
    resumed.enter("train", reset=False)
    resumed.batch = (torch.zeros(1),)
    with pytest.raises(ConfigurationError, match="reduce_fx from 'mean' to 'sum'"):
        log(resumed, "loss", 1.0, "sum")


def test_a_rank_takes_the_places_of_several() -> None:
    # F-02: fewer ranks after a resume than before it
    whole = Module()
    undisturbed = entered(whole)
    for number in range(5):
        step(undisturbed, whole, number)
    states = []
    for numbers in (range(2), range(2, 4)):
        module = Module()
        store = entered(module)
        for number in numbers:
            step(store, module, number)
        states.append(store.state_dict())
    second = Module()
    resumed = MetricStore(second)
    resumed.load_state_dict(states, CPU)
    resumed.enter("train", reset=False)
    step(resumed, second, 4)
    assert resumed.reduce_epoch(together=False) == undisturbed.reduce_epoch(together=False)
    assert torch.equal(second.seen.compute(), torch.arange(5.0))
