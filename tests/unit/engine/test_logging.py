"""log and log_dict: defaults, names, reductions, and what callbacks, the progress bar and loggers get (B-12, B-14,
H-03).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from engine_case import Tiny, fit, loader
from small_modules import calling, tiny

from drivetrain import ConfigurationError, Fit, Logger
from drivetrain.loggers import CSVLogger


class Kept(Logger):
    """A logger that records its rows."""

    name, version, log_dir = "kept", "0", None

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.status = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        assert all(type(value) in (int, float) for value in metrics.values())
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        pass

    def finalize(self, status: str) -> None:
        self.status = status

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


class Logging(Tiny):
    """Calls given functions with itself, the batch and its index."""

    def __init__(
        self, train: Callable[..., Any] | None = None, evaluate: Callable[..., Any] | None = None, **hooks: Any
    ) -> None:
        super().__init__()
        self._train = train
        self._evaluate = evaluate
        for name, hook in hooks.items():
            self.__dict__[name] = lambda *args, hook=hook: hook(self, *args)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self._train is not None:
            self._train(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if self._evaluate is not None:
            self._evaluate(self, batch, batch_idx)

    test_step = validation_step


class Metered(Logging):
    """Has a metric object, ``mean``."""

    def __init__(self, *functions: Any, **hooks: Any) -> None:
        super().__init__(*functions, **hooks)
        self.mean = torchmetrics.MeanMetric()


def _first(batch: torch.Tensor) -> torch.Tensor:
    """The mean of the sample numbers, which differs between a mean over samples and one over batches."""
    return batch[:, 0].mean()


def _values(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    assert all(value.dim() == 0 for value in metrics.values())
    return {name: round(float(value), 4) for name, value in metrics.items()}


class TestDefaults:
    """training_step: on_step; elsewhere: on_epoch; with both, suffixes."""

    def test_in_training(self, tmp_path: Path) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("plain", _first(batch))
            self.log("both", _first(batch), on_step=True, on_epoch=True)
            self.log("epoch", _first(batch), on_step=False, on_epoch=True)
            self.log("neither", 1.0, on_step=False, on_epoch=False)

        runner = fit(tmp_path)
        runner.fit(Logging(train), loader(5))  # batches of 2, 2 and 1: means 0.5, 2.5, 4
        expected = {"plain": 4.0, "both_step": 4.0, "both_epoch": 2.0, "both": 2.0, "epoch": 2.0}
        assert _values(runner.callback_metrics) == expected

    def test_in_validation_and_test(self, tmp_path: Path) -> None:
        def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("plain", _first(batch))
            self.log("both", _first(batch), on_step=True, on_epoch=True)
            self.log("step", _first(batch), on_step=True, on_epoch=False)

        expected = {"plain": 2.0, "both_epoch": 2.0}
        runner = fit(tmp_path)
        assert runner.validate(Logging(None, evaluate), loader(5), verbose=False) == [expected]
        assert _values(runner.callback_metrics) == {**expected, "both_step": 4.0, "both": 2.0, "step": 4.0}
        assert runner.test(Logging(None, evaluate), loader(5), verbose=False) == [expected]

    @pytest.mark.parametrize(
        ("hook", "on_step"),
        [
            ("on_train_start", False),
            ("on_train_epoch_start", False),
            ("on_train_batch_start", True),
            ("on_before_zero_grad", True),
            ("on_before_backward", True),
            ("on_after_backward", True),
            ("on_before_optimizer_step", True),
            ("on_train_batch_end", True),
            ("on_train_epoch_end", False),
            ("on_validation_start", False),
            ("on_validation_epoch_start", False),
            ("on_validation_batch_start", False),
            ("on_validation_batch_end", False),
            ("on_validation_epoch_end", False),
        ],
    )
    def test_by_hook(self, tmp_path: Path, hook: str, on_step: bool) -> None:
        logger = Kept()
        module = Logging(**{hook: lambda self, *_: self.log("it", 3.0)})
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1, num_sanity_val_steps=0)
        runner.fit(module, loader(4), loader(4))
        assert _values(runner.callback_metrics) == {"it": 3.0}
        assert logger.of("it") == ([(1, 3.0), (2, 3.0)] if on_step else [(2, 3.0)])

    @pytest.mark.parametrize(
        "hook", ["setup", "on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "teardown"]
    )
    def test_refused_if_the_value_would_be_dropped(self, tmp_path: Path, hook: str) -> None:
        """As in Lightning: no value is dropped silently."""
        module = Logging(**{hook: lambda self, *_: self.log("it", 3.0)})
        with pytest.raises(ConfigurationError, match="log\\('it'\\) was called outside the loops"):
            fit(tmp_path).fit(module, loader(4), loader(4))

    def test_refused_in_prediction(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="in prediction"):
            fit(tmp_path).predict(tiny(predict_step=lambda self, batch, index: self.log("it", 3.0)), loader(4))

    def test_refused_outside_a_run(self) -> None:
        """A-04."""
        with pytest.raises(ConfigurationError, match="is not in a run"):
            Tiny().log("it", 1.0)


class TestReductions:
    @pytest.mark.parametrize(
        ("reduce_fx", "expected"),
        [
            ("mean", 2.0),
            ("sum", 7.0),
            ("max", 4.0),
            ("min", 0.5),
            (torch.mean, 2.0),
            (max, 4.0),
            ("avg", 2.0),
            ("MAX", 4.0),
        ],
    )
    @pytest.mark.parametrize("number", [False, True])
    def test_reduce_fx(self, tmp_path: Path, reduce_fx: Any, expected: float, number: bool) -> None:
        """B-12: a mean is over samples, whatever the batches."""

        def step(self: Any, batch: Any, batch_idx: int) -> None:
            value = float(_first(batch)) if number else _first(batch)
            self.log("it", value, on_step=False, on_epoch=True, reduce_fx=reduce_fx)

        runner = fit(tmp_path)
        runner.fit(Logging(step), loader(5))
        assert float(runner.callback_metrics["it"]) == expected
        assert runner.validate(Logging(None, step), loader(5), verbose=False) == [{"it": expected}]

    def test_many_values_fold_without_loss(self, tmp_path: Path) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", _first(batch), on_step=False, on_epoch=True)
            self.log("last", _first(batch), on_step=False, on_epoch=True, reduce_fx="max")

        runner = fit(tmp_path)
        runner.fit(Logging(train), loader(301))
        assert _values(runner.callback_metrics) == {"it": 150.0, "last": 300.0}

    def test_training_values_survive_a_validation_in_mid_epoch(self, tmp_path: Path) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", _first(batch), on_step=False, on_epoch=True)

        def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

        runner = fit(tmp_path, val_check_interval=1)
        runner.fit(Logging(train, evaluate), loader(5), loader(4))
        assert _values(runner.callback_metrics) == {"it": 2.0, "val": 1.0}


class TestRefusals:
    @pytest.mark.parametrize(
        ("value", "options", "named"),
        [
            (torch.ones(2), {}, "was given a tensor of shape (2,)."),
            (torch.tensor(1j), {}, "was given a tensor of complex64."),
            ("high", {}, "a number, a tensor of one element"),
            ({"a": 1}, {}, "log_dict"),
            (None, {}, "was given a NoneType."),
            (1j, {}, "was given a complex."),
            (np.zeros(2), {}, "was given an array of shape (2,)."),
            (np.array("high"), {}, "was given a ndarray."),
            (np.timedelta64(5, "ns"), {}, "was given a timedelta64."),
            (1.0, {"reduce_fx": "men"}, "Did you mean 'mean'?"),
            (1.0, {"reduce_fx": torch.median}, "log a torchmetrics.Metric"),
        ],
    )
    def test_values_and_reductions(self, tmp_path: Path, value: Any, options: dict[str, Any], named: str) -> None:
        module = Logging(lambda self, *_: self.log("it", value, **options))
        with pytest.raises(ConfigurationError) as caught:
            fit(tmp_path).fit(module, loader(4))
        assert "'it'" in str(caught.value)
        assert named in str(caught.value)

    def test_changed_options_are_refused(self, tmp_path: Path) -> None:
        module = Logging(lambda self, _, index: self.log("it", 1.0, prog_bar=index > 0))
        with pytest.raises(ConfigurationError, match="other options than before: prog_bar from False to True"):
            fit(tmp_path).fit(module, loader(4))


class TestWhereValuesGo:
    def test_bar_and_loggers(self, tmp_path: Path) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("bar", 1.0, prog_bar=True, logger=False)
            self.log("log", 2.0)
            self.log("bar_epoch_only", 3.0, on_step=False, on_epoch=True, prog_bar=True)
            self.log("none", 4.0, logger=False)

        logger = Kept()
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1)
        runner.fit(Logging(train), loader(2))
        assert runner.progress_bar_metrics == {"bar": 1.0, "bar_epoch_only": 3.0}
        assert _values(runner.logged_metrics) == {"log": 2.0, "bar_epoch_only": 3.0}
        assert _values(runner.callback_metrics) == {"bar": 1.0, "log": 2.0, "bar_epoch_only": 3.0, "none": 4.0}
        assert {name for _, row in logger.rows for name in row} == {"epoch", "log", "bar_epoch_only"}
        assert logger.status == "success"

    def test_log_dict_passes_its_options_on(self, tmp_path: Path) -> None:
        module = Logging(lambda self, *_: self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True, on_epoch=True))
        runner = fit(tmp_path)
        runner.fit(module, loader(4))
        assert runner.progress_bar_metrics == {"a_step": 1.0, "a_epoch": 1.0, "b_step": 2.0, "b_epoch": 2.0}

    def test_which_rows_the_csv_logger_gets(self, tmp_path: Path) -> None:
        """Step values every ``log_every_n_steps``, and at the end of an epoch; its own values there."""

        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("loss", float(self.global_step), on_step=True, on_epoch=True)

        def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("val", float(self.global_step))

        logger = CSVLogger(tmp_path, name="", version="run")
        runner = fit(tmp_path, logger=logger, log_every_n_steps=2, max_epochs=2)
        runner.fit(Logging(train, evaluate), loader(10), loader(4))
        with open(tmp_path / "run" / "metrics.csv", newline="") as stream:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(stream)]
        by_step: dict[float, dict[str, float]] = {}
        for row in rows:
            by_step.setdefault(row.pop("step"), {}).update(row)
        assert by_step == {
            2: {"epoch": 0, "loss_step": 1},
            4: {"epoch": 0, "loss_step": 3},
            5: {"epoch": 0, "loss_step": 4, "loss_epoch": 2, "val": 5},
            6: {"epoch": 1, "loss_step": 5},
            8: {"epoch": 1, "loss_step": 7},
            10: {"epoch": 1, "loss_step": 9, "loss_epoch": 7, "val": 10},
        }

    def test_log_every_n_steps_0_logs_epochs_only(self, tmp_path: Path) -> None:
        logger = Kept()
        module = Logging(lambda self, *_: self.log("it", 1.0, on_step=True, on_epoch=True))
        fit(tmp_path, logger=logger, log_every_n_steps=0).fit(module, loader(4))
        assert logger.rows == [(2, {"epoch": 0, "it_epoch": 1.0})]

    def test_steps_are_optimizer_steps(self, tmp_path: Path) -> None:
        logger = Kept()
        module = Logging(lambda self, *_: self.log("it", float(self.trainer.micro_batches)))
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
        runner.fit(module, loader(8))
        assert logger.of("it") == [(1, 1.0), (2, 3.0)]

    def test_every_logger_gets_everything(self, tmp_path: Path) -> None:
        loggers = [Kept(), Kept()]
        runner = fit(tmp_path, logger=loggers)
        runner.fit(Logging(lambda self, *_: self.log("it", 1.0)), loader(4))
        assert loggers[0].rows == loggers[1].rows != []
        assert runner.logger is loggers[0]

    def test_the_sanity_check_leaves_nothing(self, tmp_path: Path) -> None:
        seen: list[dict[str, float]] = []
        logger = Kept()
        watching = calling("on_train_start", lambda trainer: seen.append(_values(trainer.callback_metrics)))
        module = Logging(None, lambda self, *_: self.log("val", 1.0, on_step=True, on_epoch=True))
        fit(tmp_path, logger=logger, callbacks=watching, max_steps=0).fit(module, loader(4), loader(4))
        assert (seen, logger.rows) == ([{}], [])


class TestSeveralLoaders:
    def _evaluate(self, tmp_path: Path, step: Callable[..., Any], **hooks: Any) -> tuple[Fit, list[dict[str, float]]]:
        runner = fit(tmp_path)
        return runner, runner.validate(Logging(None, step, **hooks), [loader(4), loader(2)], verbose=False)

    def test_suffixes_stand_before_it_as_in_lightning(self, tmp_path: Path) -> None:
        def step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", _first(batch), on_step=True, on_epoch=True)

        _, results = self._evaluate(tmp_path, step)
        assert results == [{"it_epoch/dataloader_idx_0": 1.5}, {"it_epoch/dataloader_idx_1": 0.5}]

    def test_without_the_index_a_key_is_over_all_loaders(self, tmp_path: Path) -> None:
        def step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", _first(batch), add_dataloader_idx=False)

        _, results = self._evaluate(tmp_path, step)
        assert results == [{"it": pytest.approx((0 + 1 + 2 + 3 + 0 + 1) / 6)}, {}]  # L-10: it is present once

    def test_values_of_no_loader_are_in_all_results(self, tmp_path: Path) -> None:
        _, results = self._evaluate(
            tmp_path,
            lambda self, batch, _: self.log("it", _first(batch)),
            on_validation_epoch_end=lambda self: self.log("all", 9.0),
        )
        assert results == [{"it/dataloader_idx_0": 1.5, "all": 9.0}, {"it/dataloader_idx_1": 0.5, "all": 9.0}]


class TestMetricObjects:
    """B-14: computed over the epoch, reset at its end."""

    def _module(self, **options: Any) -> Any:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.mean(batch[:, 0])
            self.log("train", self.mean, **options)

        def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
            self.val_mean.update(batch[:, 0])
            self.log("val", self.val_mean)

        module = Metered(train, evaluate)
        module.val_mean = torchmetrics.MeanMetric()
        return module

    def test_over_the_epoch_and_reset_at_its_end(self, tmp_path: Path) -> None:
        seen: list[float] = []

        module = self._module(on_step=True, on_epoch=True)
        watching = calling("on_train_epoch_end", lambda trainer: seen.append(float(module.mean.compute())))  # before
        logger = Kept()
        runner = fit(tmp_path, max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=watching)
        runner.fit(module, loader(5), loader(3))
        assert logger.of("train_step") == [(1, 0.5), (2, 2.5), (3, 4.0), (4, 0.5), (5, 2.5), (6, 4.0)]
        assert logger.of("train_epoch") == [(3, 2.0), (6, 2.0)]
        assert logger.of("val") == [(3, 1.0), (6, 1.0)]
        assert seen == [2.0, 2.0]
        assert module.mean.update_count == module.val_mean.update_count == 0

    def test_reset_after_a_sanity_check_and_an_evaluation(self, tmp_path: Path) -> None:
        module = self._module(on_epoch=True)
        runner = fit(tmp_path, num_sanity_val_steps=1)
        runner.fit(module, loader(5), loader(3))
        assert float(runner.callback_metrics["val"]) == 1.0
        assert runner.validate(module, loader(3), verbose=False) == [{"val": 1.0}]
        assert runner.validate(module, loader(2), verbose=False) == [{"val": 0.5}]

    def test_a_collection(self, tmp_path: Path) -> None:
        def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
            self.all.update(batch[:, 0])
            self.log_dict(self.all)

        module = Logging(None, evaluate)
        module.all = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()})
        assert fit(tmp_path).validate(module, loader(5), verbose=False) == [{"mean": 2.0, "max": 4.0}]

    def test_refused_where_it_is_no_attribute(self, tmp_path: Path) -> None:
        module = Logging(lambda self, *_: self.log("it", torchmetrics.MeanMetric()))
        with pytest.raises(ConfigurationError, match=r"MeanMetric that is not an attribute.*\n.*\n.*self.accuracy"):
            fit(tmp_path).fit(module, loader(4))

    def test_refused_where_it_is_not_one_number(self, tmp_path: Path) -> None:
        def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
            self.confusion.update(batch[:, 0] / 10, batch[:, 1].long())
            self.log("confusion", self.confusion)

        module = Logging(None, evaluate)
        module.confusion = torchmetrics.ConfusionMatrix(task="binary")
        with pytest.raises(ConfigurationError, match=r"'confusion'.*Matrix, which computes shape \(2, 2\)"):
            fit(tmp_path).validate(module, loader(4), verbose=False)


def test_log_stores_the_value_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H-03: no sync (nothing is read), no communication, and a cost that does not grow with the epoch."""
    reads: list[str] = []
    held: list[int] = []

    def train(self: Any, batch: Any, batch_idx: int) -> None:
        value = _first(batch)
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, lambda *_, name=name: reads.append(name))
            self.log("it", value, on_step=True, on_epoch=True, prog_bar=True)
            self.log("it_max", value, on_step=False, on_epoch=True, reduce_fx="max")
        held.append(max(len(entry.waiting) for entry in self.trainer.metrics.entries.values()))

    fit(tmp_path, log_every_n_steps=1).fit(Logging(train), loader(600))
    assert (reads, len(held)) == ([], 300)
    assert max(held) <= 64
