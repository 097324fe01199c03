"""The searches for a learning rate and a batch size, and that everything else is afterwards as it was before."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from drivetrain import ConfigurationError, DataModule, Fit, TrainModule
from drivetrain.callbacks import BatchSizeFinder, Checkpoint, LambdaCallback, LearningRateFinder
from drivetrain.callbacks.batch_size_finder import search_largest
from drivetrain.loggers import CSVLogger
from drivetrain.precision import MixedPrecision
from drivetrain.tuner import LRFind, Tuner

FEATURES = 4


def quiet(**settings: Any) -> Fit:
    """Return a `Fit` of one epoch on one CPU that prints and writes nothing."""
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Fit(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **options, **settings})


class Net(TrainModule):
    """Regression with dropout, buffers and a schedule; records its losses."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)  # how far a search comes before the loss rises depends on the weights
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.lr = lr
        self.batch_size = batch_size
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def loader(samples: int = 40, batch_size: int = 4, **options: Any) -> Any:
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, **options)


class Data(DataModule):
    def __init__(self, samples: int = 40, batch_size: int = 4) -> None:
        self.samples = samples
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.dataset = loader(self.samples).dataset

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size)


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


@pytest.mark.parametrize(
    ("module", "settings", "options", "named"),
    [
        (TwoOptimizers(), {}, {}, "with 2 optimizers"),
        (type("ManualNet", (Net,), {"automatic_optimization": False})(), {}, {}, "automatic_optimization=False"),
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


def test_the_callback_finds_what_the_tuner_finds_before_a_complete_fit() -> None:  # L-06
    module = Net()
    wanted = Tuner(quiet(seed=1)).lr_find(module, loader(), num_training=15, update_attr=False).suggestion()
    finder = LearningRateFinder(num_training_steps=15)
    fit = quiet(seed=1, callbacks=[finder], max_epochs=2)
    fit.fit(module, loader())
    assert finder.optimal_lr is not None
    assert module.lr == finder.optimal_lr.suggestion() == wanted
    assert fit.lr_schedulers[0].base_lrs == [wanted]
    module, finder = Net(), LearningRateFinder()
    quiet(callbacks=[finder], fast_dev_run=True).fit(module, loader())
    assert (module.lr, finder.optimal_lr) == (0.05, None)
    net_with_finder = type("Net", (Net,), {"configure_callbacks": lambda self: [LearningRateFinder()]})()
    with pytest.raises(ConfigurationError, match="LearningRateFinder was added after the run had started"):
        quiet().fit(net_with_finder, loader())


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
    module = type("Weightless", (Net,), {"batch_weight": lambda self, batch: 0.0})()
    found = Tuner(quiet()).lr_find(module, loader(8), num_training=12)
    assert found.results == {"lr": [], "loss": []}
    assert module.lr == 0.05


def _search(limit: int, mode: str, init: int, trials: int = 25, most: int = 10**9) -> tuple[int, list[int]]:
    """Return the found size and the sizes that were tried, where sizes up to ``limit`` fit."""
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= limit

    return search_largest(fits, mode, init, trials, lambda: most if sizes[-1] >= most else None), sizes


@pytest.mark.parametrize(
    ("arguments", "found", "sizes"),
    [
        ((13, "power", 2), 8, [2, 4, 8, 16]),
        ((13, "power", 50), 12, [50, 25, 12]),
        ((13, "binsearch", 2), 13, [2, 4, 8, 16, 12, 14, 13]),
        ((13, "binsearch", 50), 13, [50, 25, 12, 18, 15, 13, 14]),
        ((1, "power", 2), 1, [2, 1]),
        ((1, "binsearch", 4), 1, [4, 2, 1]),
        ((10**9, "power", 2, 3), 8, [2, 4, 8]),
        ((100, "power", 2, 25, 11), 11, [2, 4, 8, 16]),
    ],
)
def test_the_sizes_that_are_tried(arguments: tuple[Any, ...], found: int, sizes: list[int]) -> None:  # L-06
    assert _search(*arguments) == (found, sizes)
    with pytest.raises(ConfigurationError, match="batch size 1 fits"):
        _search(0, *arguments[1:])


class LimitedNet(Net):
    def _check_memory(self, batch: Any) -> Any:
        if len(batch[0]) > 13:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self._check_memory(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._check_memory(batch)

    def train_dataloader(self) -> Any:
        return loader(30, batch_size=self.batch_size)


def test_the_found_size_is_set_where_the_loaders_read_it_for_evaluation_too() -> None:  # L-06
    module, data = LimitedNet(), Data(30)
    assert Tuner(quiet()).scale_batch_size(module, datamodule=data, mode="binsearch", init_val=8) == 13
    assert (data.batch_size, module.batch_size) == (13, 13)
    module = LimitedNet()
    assert Tuner(quiet()).scale_batch_size(module, init_val=8) == module.batch_size == 8
    given, five = loader(30), np.int64(5)
    assert Tuner(quiet()).scale_batch_size(LimitedNet(), given, init_val=five) == 10  # type: ignore[arg-type]
    assert given.batch_size == given.batch_sampler.batch_size == 4
    options: dict[str, Any] = {"method": "validate", "init_val": 4}
    assert Tuner(quiet()).scale_batch_size(LimitedNet(), datamodule=Data(30), **options) == 8
    assert Tuner(quiet()).scale_batch_size(LimitedNet(), dataloaders=loader(7), **options) == 7  # all samples


@pytest.mark.parametrize(
    ("settings", "loaders", "mode", "found"),
    [
        ({}, loader(11), "power", 11),
        ({}, loader(11, drop_last=True), "binsearch", 11),
        ({"limit_train_batches": 0.1}, loader(100), "power", 8),  # a tenth of 7 batches, of 16 samples, is no batch
    ],
)
def test_the_data_set_is_the_limit(settings: Any, loaders: Any, mode: Any, found: int, caplog: Any) -> None:  # L-06
    caplog.set_level("INFO", "drivetrain")
    assert Tuner(quiet(**settings)).scale_batch_size(Net(), loaders, mode=mode, init_val=4) == found
    assert ("which is the number of samples that a rank has" in caplog.text) == (mode == "power" and found == 11)


class ConstantData(Data):
    """Does not use its batch size."""

    def train_dataloader(self) -> Any:
        return loader(60, 32)


SAMPLES = loader(8).dataset
STREAM: Any = type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(SAMPLES)})()
OWN_BATCHES = DataLoader(SAMPLES, batch_sampler=BatchSampler(range(8), 2, False))


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        (DataLoader(STREAM, batch_size=None), {}, "a DataLoader, cannot be changed"),
        (OWN_BATCHES, {}, "with a batch_size can be rebuilt"),
        ([loader(), loader()], {}, "passed to fit, a list, cannot be changed"),
        (Data(), {"batch_arg_name": "size"}, "has an attribute or hyper-parameter 'size'"),
        (ConstantData(), {}, "batch_size=2, but the first batch holds 32 samples"),
        (loader(), {"mode": "cubic"}, "cubic"),
        (loader(), {"init_val": 0}, "init_val"),
        (loader(), {"max_trials": 0}, "max_trials"),
        (loader(), {"steps_per_trial": 0}, "steps_per_trial"),
        (loader(), {"method": "fits"}, "fits"),
    ],
)
def test_a_size_that_cannot_be_changed_is_refused(source: Any, options: dict[str, Any], named: str) -> None:  # L-06
    where = "datamodule" if isinstance(source, Data) else "train_dataloaders"
    with pytest.raises(ConfigurationError, match=named):
        Tuner(quiet()).scale_batch_size(Net(), **{where: source}, **options)


def test_other_errors_than_out_of_memory_are_raised() -> None:  # L-06
    class FailingNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Tuner(quiet()).scale_batch_size(FailingNet(), loader())


def test_the_callback_sets_the_size_that_the_run_uses() -> None:  # L-06
    with pytest.raises(ConfigurationError, match="BatchSizeFinder does not work with loaders passed to fit"):
        quiet(callbacks=[BatchSizeFinder()]).fit(Net(), loader())
    finder, data = BatchSizeFinder(mode="binsearch", init_val=8), Data(26)
    fit = quiet(callbacks=[finder])
    fit.fit(LimitedNet(), datamodule=data)
    assert (finder.optimal_batch_size, data.batch_size, fit.global_step) == (13, 13, 2)
    finder, data = BatchSizeFinder(init_val=8), Data(26)
    quiet(callbacks=[finder]).validate(LimitedNet(), datamodule=data, verbose=False)
    assert data.batch_size == 8


class NoisyDataset(Dataset[Any]):
    """Adds noise to its samples, from the global random generators and from its own."""

    def __init__(self) -> None:
        self.x = torch.randn(30, FEATURES, generator=torch.Generator().manual_seed(3))
        self.generator = np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(FEATURES) + random.random() + float(np.random.rand()) + float(self.generator.random())
        x = self.x[index]
        return x + 0.01 * noise, x.sum().reshape(1)


def noisy_loader(draws: str) -> Any:
    generator = torch.Generator().manual_seed(2)
    if draws == "shuffled":
        return DataLoader(NoisyDataset(), batch_size=4, shuffle=True, generator=generator)
    return DataLoader(NoisyDataset(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 30, 30, generator=generator))


def train(root: Path, draws: str, searches: int, **settings: Any) -> dict[str, Any]:
    """Train after as many searches, and return everything that a search could have changed."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module, loaders = Net(), noisy_loader(draws)
    module.net[0].weight.requires_grad_(False)
    module.net[1].eval()
    module.net[4].bias.grad = torch.ones(1)
    batches: list[int] = []
    counting = LambdaCallback(on_train_batch_end=lambda *arguments: batches.append(arguments[-1]))
    callbacks = [counting, Checkpoint(dirpath=root / "kept")]
    fit = quiet(max_epochs=2, logger=CSVLogger(root), callbacks=callbacks, log_every_n_steps=1, **settings)
    if searches:
        found = Tuner(fit).lr_find(module, loaders, num_training=17, update_attr=False, early_stop_threshold=None)
        assert len(found.results["lr"]) == 17
        if searches == 2:
            assert Tuner(fit).scale_batch_size(module, loaders, init_val=3, max_trials=2) == 6
        assert not root.exists()
        assert (fit.state, fit.module, fit.global_step, batches) == ("idle", None, 0, [])
        assert module.losses == []
        assert module.net[4].bias.grad is not None
        assert [one.training for one in module.net] == [True, False, True, True, True]
        assert not module.net[0].weight.requires_grad
    fit.fit(module, loaders)
    (rows,) = root.rglob("metrics.csv")
    return {
        "weights": dict(module.state_dict()),
        "optimizer": fit.optimizers[0].state_dict()["state"],
        "rates": fit.lr_schedulers[0].get_last_lr(),
        "losses": module.losses,
        "metrics": dict(fit.callback_metrics),
        "counters": (fit.global_step, fit.current_epoch, fit.samples_seen, batches),
        "draws": (torch.rand(2), random.random(), float(np.random.rand()), float(loaders.dataset.generator.random())),
        "rows": rows.read_text(),
    }


@pytest.mark.parametrize(
    ("draws", "searches", "settings"),
    [
        ("shuffled", 1, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("weighted", 2, {"seed": 3, "precision": "16-mixed"}),
    ],
)
def test_a_fit_after_a_search_equals_one_without_it(tmp_path: Path, draws: str, searches: int, settings: Any) -> None:
    # L-06
    plain = train(tmp_path / "plain", draws, 0, **settings)
    after = train(tmp_path / "after", draws, searches, **settings)
    assert after.pop("rows") == plain["rows"]
    for key, value in after.items():
        torch.testing.assert_close(value, plain[key], rtol=0, atol=0, msg=f"{key} differs")


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (RuntimeError("broken"), RuntimeError),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (signal.SIGINT, KeyboardInterrupt),
        (signal.SIGTERM, SystemExit),
    ],
)
def test_searches_that_fail_or_stop_change_nothing(cause: Any, kind: Any, tmp_path: Path, caplog: Any) -> None:  # L-06
    class FailingNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 4:
                if not isinstance(cause, signal.Signals):
                    raise cause
                os.kill(os.getpid(), cause)
            return super().training_step(batch, batch_idx)

    module, data, loaders = FailingNet(), Data(), noisy_loader("shuffled")
    before = {name: one.clone() for name, one in module.state_dict().items()}
    draws = (torch.get_rng_state(), random.getstate(), loaders.dataset.generator.bit_generator.state)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for source in ({"train_dataloaders": loaders}, {"datamodule": data}):
        caplog.clear()
        with pytest.raises(kind):
            Tuner(quiet(default_root_dir=tmp_path, logger=True)).lr_find(module, **source)
    if isinstance(cause, signal.Signals):
        assert caplog.messages[-1].startswith(f"{cause.name}: the trial ends after this step. ")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(draws[0], torch.get_rng_state())
    assert draws[1:] == (random.getstate(), loaders.dataset.generator.bit_generator.state)
    assert not hasattr(data, "dataset")
    assert (module.lr, module.losses) == (0.05, [])
    assert not list(tmp_path.iterdir())


class CountedStream(IterableDataset[Any]):
    position = 7

    def __iter__(self) -> Iterator[Any]:
        for _ in range(24):
            self.position += 1
            yield torch.full((FEATURES,), float(self.position)), torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class LateNet(Net):
    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.lr, self.losses = 0.1, []
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(FEATURES, 1)

    def configure_callbacks(self) -> Any:
        raise AssertionError("the module's callbacks have no part in a trial")


def test_a_search_changes_no_stream_precision_or_workers_and_builds_no_layers_of_configure_model() -> None:  # L-06
    module, stream = LateNet(), CountedStream()
    Tuner(quiet()).lr_find(module, DataLoader(stream, batch_size=4), num_training=8)
    assert stream.position == 7
    assert module.net is None
    assert list(module.parameters()) == []
    precision = MixedPrecision("16-mixed", "cpu")
    workers = loader(num_workers=1, persistent_workers=True)
    before = precision.state_dict(), vars(workers).copy()
    Tuner(quiet(precision=precision)).lr_find(Net(), workers, num_training=12)
    assert (precision.state_dict(), vars(workers)) == before


@pytest.mark.parametrize("profiler", ["simple", "pytorch"])
def test_a_search_prints_only_what_it_found(monkeypatch: Any, capfd: Any, tmp_path: Path, profiler: str) -> None:
    # L-05, L-06
    class LoggingNet(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_image("batch", batch[0], self.global_step)
            self.loggers[1].run["step"].log(self.global_step)
            self.logger.log_hyperparams({"a": 1})
            self.logger.log_image("batch", batch[0], self.global_step)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(logging.getLogger("drivetrain"), "propagate", False)  # else pytest captures it
    loggers = [CSVLogger(tmp_path), CSVLogger(tmp_path / "second")]
    fit = quiet(profiler=profiler, enable_progress_bar=True, enable_model_summary=True, logger=loggers)
    module = LoggingNet()
    found = Tuner(fit).lr_find(module, loader(), num_training=15, early_stop_threshold=None)
    assert len(found.results["lr"]) == 15
    assert capfd.readouterr() == ("", f"LoggingNet.lr is set to the learning rate {module.lr:.4g}.\n")
    assert not list(tmp_path.iterdir())
    assert fit.profiler.summary() == ""


def test_a_search_that_could_not_be_undone_is_refused() -> None:  # L-06
    with pytest.raises(ConfigurationError, match="yields each batch once"):
        Tuner(quiet()).lr_find(Net(), iter(loader()))


class SavedNet(Net):
    def __init__(self, lr: float = 0.05, width: int = 1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


@pytest.mark.parametrize("searches", ["tuner", "finder"])
def test_a_run_resumes_although_its_search_finds_another_rate(tmp_path: Path, searches: str) -> None:  # L-06, J-13
    def trained(epochs: int, steps: int, width: int = 1) -> tuple[float, str]:
        search: dict[str, Any] = {"min_lr": 1e-4 * steps, "max_lr": 1e-1}
        finder = [LearningRateFinder(num_training_steps=steps, **search)] if searches == "finder" else []
        fit = quiet(default_root_dir=tmp_path, max_epochs=epochs, enable_checkpointing=True, callbacks=finder)
        module = SavedNet(width=width)
        if searches == "tuner":
            Tuner(fit).lr_find(module, loader(), num_training=steps, **search)
        fit.fit(module, loader(), ckpt_path="auto")
        return module.hparams["lr"], str(fit.log_dir)

    first, second = trained(1, 15), trained(2, 20)
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert trained(2, 20, width=2)[1] != first[1]
