"""The search for a learning rate: what is tried, what is suggested, and where it is set."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from tuner_case import Data, Net, loader, quiet

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import LearningRateFinder
from drivetrain.tuner import LRFind, Tuner


@pytest.mark.parametrize(("window", "mode"), [(1, "linear"), (2, "exponential")])
def test_rates_and_losses_are_those_of_a_loop_by_hand(window: int, mode: Any) -> None:  # L-06
    module = Net()
    module.net[2] = torch.nn.Identity()
    options: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 1e-1, "num_training": 6, "early_stop_threshold": None}
    found = Tuner(quiet(accumulate_grad_batches=window)).lr_find(module, loader(24), mode=mode, **options)
    # Written by hand: the oracle has no search.
    optimizer, average, losses = module.configure_optimizers()[0][0], 0.0, []
    batches = list(loader(24))
    exponential = mode == "exponential"
    rates = [1e-3 * 100 ** (step / 5) if exponential else 1e-3 + 0.099 * step / 5 for step in range(6)]
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = 0.0
        for offset in range(window):
            x, y = batches[(step * window + offset) % 6]
            part = torch.nn.functional.mse_loss(module.net(x), y) / window
            part.backward()
            loss += part.item()
        optimizer.step()
        average = 0.98 * average + 0.02 * loss
        losses.append(average / (1 - 0.98 ** (step + 1)))
    assert found.results["lr"] == pytest.approx(rates)
    assert found.results["loss"] == pytest.approx(losses, rel=1e-5)


RATES = [10.0 ** (step / 10 - 6) for step in range(50)]
LOSSES = [-math.tanh(step - 30) for step in range(50)]
WITH_NAN = [*LOSSES[:12], *[math.nan] * 13, *LOSSES[25:]]


def test_the_suggestion_is_where_the_loss_falls_most_steeply() -> None:  # L-06
    found = LRFind({"lr": RATES, "loss": LOSSES})
    assert found.suggestion() == LRFind({"lr": RATES, "loss": WITH_NAN}).suggestion() == RATES[30]
    assert found.suggestion(skip_begin=31, skip_end=0) == RATES[31]
    assert LRFind({"lr": RATES[:11], "loss": LOSSES[:11]}).suggestion() is None


def test_a_plot_shows_the_losses_and_the_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:  # L-06
    found = LRFind({"lr": RATES, "loss": LOSSES})
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.pyplot", None)  # as Python marks what cannot be imported
        with pytest.raises(ConfigurationError, match="needs matplotlib"):
            found.plot()
    pytest.importorskip("matplotlib").use("Agg")
    (axes,) = found.plot(suggest=True).axes
    curve, mark = axes.lines
    assert (list(curve.get_xdata()), list(mark.get_xdata())) == (RATES, [RATES[30]])
    assert axes.get_xscale() == "log"


class HyperparameterNet(Net):
    """Has its learning rate only in its hyper-parameters, and a schedule for which nothing is validated."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        del self.lr

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.hparams.learning_rate)
        assert self.trainer.max_epochs  # as OneCycleLR needs it
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def test_the_rate_is_set_where_the_module_has_it_and_schedules_are_not_stepped() -> None:  # L-06
    module: Any = Net()
    found = Tuner(quiet()).lr_find(module, datamodule=Data(), num_training=15)
    assert module.lr == found.suggestion()
    module = HyperparameterNet()
    found = Tuner(quiet(max_epochs=2)).lr_find(module, loader(), num_training=15, max_lr=0.1, early_stop_threshold=None)
    assert module.hparams.learning_rate == found.suggestion()
    assert len(found.results["lr"]) == 15  # more than an epoch
    module = Net()
    module.rate = 1.0
    found = Tuner(quiet()).lr_find(module, loader(), num_training=15, attr_name="rate")
    assert (module.rate, module.lr) == (found.suggestion(), 0.05)
    assert Tuner(quiet()).lr_find(module, loader(), num_training=8).suggestion() is None
    assert module.lr == 0.05


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [SGD(self.net[0].parameters(), 0.1), SGD(self.net[4].parameters(), 0.1)], []


class ManualNet(Net):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "settings", "options", "named"),
    [
        (TwoOptimizers(), {}, {}, "returned 2 optimizers"),
        (ManualNet(), {}, {}, "automatic_optimization is False"),
        (Net(), {}, {"mode": "cubic"}, "cubic"),
        (Net(), {}, {"min_lr": 1.0, "max_lr": 0.1}, "max_lr"),
        (Net(), {}, {"num_training": 1}, "num_training"),
        (Net(), {}, {"attr_name": "alpha"}, "no attribute or hyper-parameter 'alpha'"),
        (Net(), {"fast_dev_run": True}, {}, "fast_dev_run"),
        (torch.nn.Linear(1, 1), {}, {}, "was given a Linear in place of the module"),
    ],
)
def test_an_impossible_search_is_refused(module: Any, settings: Any, options: Any, named: str) -> None:  # L-06
    with pytest.raises(ConfigurationError, match=named):
        Tuner(quiet(**settings)).lr_find(module, loader(), **options)


def test_the_callback_finds_what_the_tuner_finds(tmp_path: Path) -> None:  # L-06
    module = Net()
    wanted = Tuner(quiet(seed=1)).lr_find(module, loader(), num_training=15, update_attr=False).suggestion()
    finder = LearningRateFinder(num_training_steps=15)
    fit = quiet(seed=1, callbacks=[finder], max_epochs=2)
    fit.fit(module, loader())
    assert finder.optimal_lr is not None
    assert module.lr == finder.optimal_lr.suggestion() == wanted
    assert fit.lr_schedulers[0].base_lrs == [wanted]
    fit.save_checkpoint(tmp_path / "kept")

    later, resumed = LearningRateFinder(num_training_steps=15), Net()
    quiet(seed=1, callbacks=[later], max_epochs=3).fit(resumed, loader(), ckpt_path=tmp_path / "kept")
    assert later.optimal_lr is None
    assert resumed.lr == wanted


def test_the_callback_searches_only_in_a_complete_fit() -> None:  # L-06
    module, finder = Net(), LearningRateFinder()
    quiet(callbacks=[finder], fast_dev_run=True).fit(module, loader())
    assert (module.lr, finder.optimal_lr) == (0.05, None)

    class NetWithFinder(Net):
        def configure_callbacks(self) -> list[Callback]:
            return [LearningRateFinder()]

    with pytest.raises(ConfigurationError, match="LearningRateFinder was added after the run had started"):
        quiet().fit(NetWithFinder(), loader())


@pytest.mark.parametrize("shift", [0, -100], ids=["above zero", "below zero"])
def test_the_search_ends_where_the_loss_rises_and_not_before(shift: float) -> None:  # L-06
    class Shifted(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + shift

    for max_lr, is_complete in ((0.1, True), (1e9, False)):
        found = Tuner(quiet()).lr_find(Shifted(), loader(), num_training=30, max_lr=max_lr, update_attr=False)
        assert (len(found.results["loss"]) == 30) == is_complete


@pytest.mark.timeout(60)
def test_a_search_in_which_no_step_is_made_ends() -> None:  # L-06
    class Weightless(Net):
        def batch_weight(self, batch: Any) -> float:
            return 0.0

    module = Weightless()
    found = Tuner(quiet()).lr_find(module, loader(8), num_training=12)
    assert found.results == {"lr": [], "loss": []}
    assert module.lr == 0.05
