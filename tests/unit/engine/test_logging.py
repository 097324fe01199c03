"""log and log_dict: names, reductions, who gets what (B-12, B-14, H-03), and that values are as at the call (I-01)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from engine_case import Tiny, fit, loader
from small_modules import calling, metrics, tiny

from drivetrain import ConfigurationError, Fit, Logger
from drivetrain._log_queue import LogQueue, _Row  # private: rows wait for a device only
from drivetrain.callbacks import LambdaCallback

EPOCH: dict[str, Any] = {"on_step": False, "on_epoch": True}
BOTH: dict[str, Any] = {"on_step": True, "on_epoch": True}


class Kept(Logger):
    name, version, log_dir = "kept", "0", None

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.status = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        assert all(type(value) in (int, float) for value in metrics.values())
        self.rows.append((step, dict(metrics)))

    def finalize(self, status: str) -> None:
        self.status = status

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


class Logging(Tiny):
    """Calls given functions with itself, the batch and its index."""

    def __init__(self, train: Any = None, evaluate: Callable[..., Any] | None = None, **hooks: Any) -> None:
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
    def __init__(self, *functions: Any, **hooks: Any) -> None:
        super().__init__(*functions, **hooks)
        self.mean = torchmetrics.MeanMetric()


def mean(batch: torch.Tensor) -> torch.Tensor:
    """The mean of the sample numbers, which differs between a mean over samples and one over batches."""
    return batch[:, 0].mean()


def logs(value: Any = mean, name: str = "it", **options: Any) -> Callable[..., None]:
    """Return a step or hook that logs the value, or the function's value of the batch."""

    def log(self: Any, batch: Any = None, *_: Any) -> None:
        self.log(name, value(batch) if value is mean else value, **options)

    return log


def trained(path: Path, train: Callable[..., Any] | Tiny, samples: int = 4, validated: int = 0, **options: Any) -> Fit:
    """Return a Fit that has trained on, and validated with, so many samples; ``train`` is a step or a module."""
    trainer = fit(path, log_every_n_steps=1, **options)
    module = train if isinstance(train, Tiny) else Logging(train)
    trainer.fit(module, loader(samples), loader(validated) if validated else None)
    return trainer


def test_defaults_and_names_in_training(tmp_path: Path) -> None:
    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("plain", mean(batch))
        self.log("both", mean(batch), **BOTH)
        self.log("epoch", mean(batch), **EPOCH)
        self.log("neither", 1.0, on_step=False, on_epoch=False)

    trainer = trained(tmp_path, train, 5)  # batches of 2, 2 and 1: means 0.5, 2.5, 4
    assert metrics(trainer) == {"plain": 4.0, "both_step": 4.0, "both_epoch": 2.0, "both": 2.0, "epoch": 2.0}
    assert all(value.dim() == 0 for value in trainer.callback_metrics.values())


def test_defaults_and_names_in_validation_and_test(tmp_path: Path) -> None:
    def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("plain", mean(batch))
        self.log("both", mean(batch), **BOTH)
        self.log("step", mean(batch), on_step=True, on_epoch=False)

    expected = {"plain": 2.0, "both_epoch": 2.0}
    trainer = fit(tmp_path)
    assert trainer.validate(Logging(None, evaluate), loader(5), verbose=False) == [expected]
    assert metrics(trainer) == {**expected, "both_step": 4.0, "both": 2.0, "step": 4.0}
    assert trainer.test(Logging(None, evaluate), loader(5), verbose=False) == [expected]


BY_STEP = [f"on_train_batch_{at}" for at in ("start", "end")]
BY_STEP += ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
BY_EPOCH = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start"]
BY_EPOCH += [f"on_validation_{of}_{at}" for of in ("epoch", "batch") for at in ("start", "end")]


@pytest.mark.parametrize("hook", [*BY_STEP, *BY_EPOCH])
def test_a_hook_of_a_step_logs_by_step_and_others_by_epoch(tmp_path: Path, hook: str) -> None:
    logger = Kept()
    module = Logging(**{hook: lambda self, *_: self.log("it", 3.0)})
    trainer = trained(tmp_path, module, 4, 4, logger=logger, num_sanity_val_steps=0)
    assert metrics(trainer) == {"it": 3.0}
    assert logger.of("it") == ([(1, 3.0), (2, 3.0)] if hook in BY_STEP else [(2, 3.0)])


@pytest.mark.parametrize(
    "hook", ["setup", "on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "teardown"]
)
def test_a_hook_whose_value_would_be_dropped_may_not_log(tmp_path: Path, hook: str) -> None:
    with pytest.raises(ConfigurationError, match="log\\('it'\\) was called outside the loops"):
        trained(tmp_path, Logging(**{hook: lambda self, *_: self.log("it", 3.0)}), 4, 4)


def test_prediction_and_modules_outside_a_run_may_not_log(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="in prediction"):
        fit(tmp_path).predict(tiny(predict_step=logs(3.0)), loader(4))
    with pytest.raises(ConfigurationError, match="is not in a run"):
        Tiny().log("it", 1.0)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", 2), ("sum", 7), ("max", 4), ("min", 0.5), (torch.mean, 2), (max, 4), ("avg", 2), ("MAX", 4)],
)
@pytest.mark.parametrize("number", [False, True])
def test_reduce_fx(tmp_path: Path, reduce_fx: Any, expected: float, number: bool) -> None:  # B-12
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        value = float(mean(batch)) if number else mean(batch)
        self.log("it", value, **EPOCH, reduce_fx=reduce_fx)

    trainer = trained(tmp_path, step, 5)
    assert metrics(trainer) == {"it": expected}
    assert trainer.validate(Logging(None, step), loader(5), verbose=False) == [{"it": expected}]


def test_many_values_are_folded_without_loss(tmp_path: Path) -> None:  # H-03
    held: list[int] = []

    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("it", mean(batch), **EPOCH)
        self.log("last", mean(batch), **EPOCH, reduce_fx="max")
        held.append(max(len(entry.waiting) for entry in self.trainer.metrics.entries.values()))

    assert metrics(trained(tmp_path, train, 301)) == {"it": 150.0, "last": 300.0}
    assert max(held) <= 64


def test_training_values_survive_a_validation_in_mid_epoch(tmp_path: Path) -> None:
    module = Logging(logs(**EPOCH), logs(1.0, "val"))
    assert metrics(trained(tmp_path, module, 5, 4, val_check_interval=1)) == {"it": 2.0, "val": 1.0}


@pytest.mark.parametrize(
    ("value", "options", "named"),
    [
        (torch.ones(2), {}, "was given a tensor of shape (2,) and"),
        (torch.tensor(1j), {}, "dtype torch.complex64."),
        ("high", {}, "a number, a tensor of one element"),
        ({"a": 1}, {}, "log_dict"),
        (None, {}, "was given a NoneType."),
        (1j, {}, "was given a complex."),
        (np.zeros(2), {}, "was given a ndarray."),
        (np.array("high"), {}, "was given a ndarray."),
        (np.timedelta64(5, "ns"), {}, "was given a timedelta64."),
        (torchmetrics.MeanMetric(), {}, "was given a MeanMetric that is not an attribute"),
        (torchmetrics.MeanMetric(), {}, "self.accuracy"),
        (1.0, {"reduce_fx": "men"}, "Did you mean 'mean'?"),
        *((1.0, {"batch_size": weight}, f"log('it', batch_size={weight!r}") for weight in (-1, -0.5, float("nan"))),
        (1.0, {"batch_size": np.int64(-1)}, "log('it', batch_size="),
        (1.0, {"reduce_fx": torch.median}, "log a torchmetrics.Metric"),
    ],
)
def test_other_values_and_reductions_are_refused(tmp_path: Path, value: Any, options: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        trained(tmp_path, logs(value, on_epoch=True, **options))
    assert "'it'" in str(caught.value)
    assert named in str(caught.value)


def test_changed_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"called with .*True, 'mean', None\), and with .* before"):
        trained(tmp_path, lambda self, _, index: self.log("it", 1.0, prog_bar=index > 0))


def test_values_go_to_the_bar_and_to_all_loggers(tmp_path: Path) -> None:
    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("bar", 1.0, prog_bar=True, logger=False)
        self.log("log", 2.0)
        self.log("bar_epoch_only", 3.0, **EPOCH, prog_bar=True)
        self.log_dict({"none": 4.0, "neither": 5.0}, logger=False)

    loggers = [Kept(), Kept()]
    trainer = trained(tmp_path, train, 2, logger=loggers)
    assert trainer.progress_bar_metrics == {"bar": 1.0, "bar_epoch_only": 3.0}
    assert trainer.logged_metrics == {"log": 2.0, "bar_epoch_only": 3.0}
    assert metrics(trainer) == {"bar": 1.0, "log": 2.0, "bar_epoch_only": 3.0, "none": 4.0, "neither": 5.0}
    assert {name for _, row in loggers[0].rows for name in row} == {"epoch", "log", "bar_epoch_only"}
    assert loggers[0].rows == loggers[1].rows
    assert trainer.logger is loggers[0]
    assert loggers[1].status == "success"


TWO_EPOCHS = {
    2: {"epoch": 0, "it_step": 1},
    4: {"epoch": 0, "it_step": 3},
    5: {"epoch": 0, "it_step": 4, "it_epoch": 2, "val": 5},
    6: {"epoch": 1, "it_step": 5},
    8: {"epoch": 1, "it_step": 7},
    10: {"epoch": 1, "it_step": 9, "it_epoch": 7, "val": 10},
}
WINDOWS = {
    1: {"epoch": 0, "it_step": 0},
    2: {"epoch": 0, "it_step": 1},
    3: {"epoch": 0, "it_step": 2, "it_epoch": 0.8, "val": 3},
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"log_every_n_steps": 2, "max_epochs": 2}, TWO_EPOCHS, id="every second step"),
        pytest.param({"log_every_n_steps": 0}, {5: {"epoch": 0, "it_epoch": 2, "val": 5, "last": 5}}, id="epochs only"),
        pytest.param({"log_every_n_steps": 1, "accumulate_grad_batches": 2}, WINDOWS, id="by optimizer steps"),
    ],
)
def test_which_rows_a_logger_gets(tmp_path: Path, options: Any, expected: dict[int, dict[str, float]]) -> None:
    """Step values every ``log_every_n_steps`` and at the end of an epoch, and the epoch's own values there."""

    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("it", float(self.global_step), **BOTH)

    def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.global_step))
        if options["log_every_n_steps"] == 0:  # step values of an evaluation are sent at its end
            self.log("last", float(self.global_step), on_step=True, on_epoch=False)

    logger = Kept()
    fit(tmp_path, logger=logger, **options).fit(Logging(train, evaluate), loader(10), loader(4))
    by_step: dict[int, dict[str, float]] = {}
    for step, row in logger.rows:
        by_step.setdefault(step, {}).update(row)
    assert by_step == expected


def test_the_sanity_check_leaves_nothing(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    logger = Kept()
    watching = calling("on_train_start", lambda trainer: seen.append(metrics(trainer)))
    module = Logging(None, logs(1.0, "val", **BOTH))
    trained(tmp_path, module, 4, 4, logger=logger, callbacks=watching, max_steps=0)
    assert (seen, logger.rows) == ([{}], [])


def by_loader(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    self.log(("first", "second")[dataloader_idx], 1.0 + dataloader_idx, add_dataloader_idx=False)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        # Suffixes stand before the index, as in Lightning.
        (Logging(None, logs(**BOTH)), [{"it_epoch/dataloader_idx_0": 1.5}, {"it_epoch/dataloader_idx_1": 0.5}]),
        # Without the index a key is over all loaders, and present once.
        (Logging(None, logs(add_dataloader_idx=False)), [{"it": pytest.approx((0 + 1 + 2 + 3 + 0 + 1) / 6)}, {}]),
        # Present in the result of the only loader that logs it.
        (
            tiny(validation_step=by_loader, on_validation_epoch_end=logs(3.0, "both")),
            [{"first": 1.0, "both": 3.0}, {"second": 2.0, "both": 3.0}],
        ),
        # Values of no loader are in all results.
        (
            Logging(None, logs(), on_validation_epoch_end=logs(9.0, "all")),
            [{"it/dataloader_idx_0": 1.5, "all": 9.0}, {"it/dataloader_idx_1": 0.5, "all": 9.0}],
        ),
    ],
)
def test_names_for_several_loaders(tmp_path: Path, module: Tiny, expected: Any) -> None:  # L-10
    assert fit(tmp_path).validate(module, [loader(4), loader(2)], verbose=False) == expected


def test_a_metric_is_over_the_epoch_and_reset_at_its_end(tmp_path: Path) -> None:  # B-14
    before: list[float] = []

    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean(batch[:, 0])
        self.log("train", self.mean, **BOTH)

    def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
        self.val_mean.update(batch[:, 0])
        self.log("val", self.val_mean)

    module, logger = Metered(train, evaluate), Kept()
    module.val_mean = torchmetrics.MeanMetric()
    watching = calling("on_train_epoch_end", lambda trainer: before.append(float(module.mean.compute())))
    options = {"max_epochs": 2, "num_sanity_val_steps": 1}
    trainer = trained(tmp_path, module, 5, 3, logger=logger, callbacks=watching, **options)
    assert logger.of("train_step") == [(1, 0.5), (2, 2.5), (3, 4.0), (4, 0.5), (5, 2.5), (6, 4.0)]
    assert logger.of("train_epoch") == [(3, 2.0), (6, 2.0)]
    assert logger.of("val") == [(3, 1.0), (6, 1.0)]
    assert before == [2.0, 2.0]
    assert module.mean.update_count == module.val_mean.update_count == 0
    for samples, expected in ((3, 1.0), (2, 0.5)):
        assert trainer.validate(module, loader(samples), verbose=False) == [{"val": expected}]


def test_a_metric_collection(tmp_path: Path) -> None:
    def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
        self.all.update(batch[:, 0])
        self.log_dict(self.all)

    module = Logging(None, evaluate)
    module.all = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()})
    assert fit(tmp_path).validate(module, loader(5), verbose=False) == [{"mean": 2.0, "max": 4.0}]


class FullDisk(Kept):
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if step < 3:
            raise OSError(f"no space left at {step}")
        super().log_metrics(metrics, step)


def test_other_loggers_get_rows_that_one_fails_to_write() -> None:  # O-04
    """On a GPU several rows may be left at the end of a run."""
    full, other, queue = FullDisk(), Kept(), LogQueue()
    with pytest.raises(OSError, match="at 1"):
        queue.put([full, other], {"loss": 1.0}, 1)
    # as if their numbers had not arrived
    queue.rows += [_Row([full, other], {"loss": 1.0}, step) for step in (2, 3)]
    with pytest.raises(OSError, match="at 2"):
        queue.deliver(wait=True)
    assert [[step for step, _ in one.rows] for one in (full, other)] == [[3], [1, 2, 3]]


BIG = 2**24 + 1  # the first integer that float32 cannot represent


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_parameter_of_one_element_is_logged_as_it_was(tmp_path: Path, shape: tuple[int, ...]) -> None:  # I-01
    """CLIP's ``logit_scale``: the optimizer changes it after the call."""
    seen: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(self.scale.item())
        self.log("scale", self.scale, **BOTH)
        return (self.scale * self.layer(batch)).square().mean()

    module = tiny(training_step=training_step)
    module.scale, module.lr = torch.nn.Parameter(torch.ones(shape)), 0.1
    logger = Kept()
    trainer = trained(tmp_path, module, 8, logger=logger)
    assert len(set(seen)) == 4  # it changes
    assert logger.of("scale_step") == list(enumerate(seen, 1))
    assert metrics(trainer)["scale_epoch"] == pytest.approx(sum(seen) / 4, rel=1e-12)
    assert metrics(trainer)["scale_step"] == seen[-1]


def test_arrays_and_weights_that_are_used_again_are_logged_as_they_were(tmp_path: Path) -> None:  # I-01
    """A count of tokens is often a tensor; like a value, it is not read."""
    scratch, count = np.zeros(()), torch.zeros((), dtype=torch.long)

    def train(self: Any, batch: Any, batch_idx: int) -> None:
        scratch[...] = batch_idx + 1
        count.fill_(batch_idx + 1)
        self.log("array", scratch, **EPOCH, reduce_fx="sum")
        self.log("number", float(mean(batch)), **EPOCH, batch_size=count)
        self.log("tensor", mean(batch), **EPOCH, batch_size=count)

    weighted = pytest.approx((0.5 * 1 + 2.5 * 2 + 4 * 3) / 6)
    assert metrics(trained(tmp_path, train, 5)) == {"array": 1 + 2 + 3, "number": weighted, "tensor": weighted}


def test_changes_to_a_read_value_have_no_effect(tmp_path: Path) -> None:  # I-01
    def to_percents(trainer: Any, *_: Any) -> None:
        for read in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            for name in read:
                read[name] *= 100

    callback = LambdaCallback(on_train_batch_end=to_percents, on_train_end=to_percents)
    trainer = trained(tmp_path, logs(**BOTH, prog_bar=True), 5, callbacks=callback)
    assert metrics(trainer) == {"it": 2.0, "it_epoch": 2.0, "it_step": 4.0}


def test_a_view_of_an_activation_does_not_keep_the_activation(tmp_path: Path) -> None:  # I-01
    held: list[int] = []

    class Wide(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            wide = self.layer(batch).expand(2, 2**17) * 1.0  # 1 MiB
            self.log("view", wide[0, 0], **BOTH)
            self.log("slice", wide[:1, :1], **BOTH)
            return wide.mean()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 9):
                gc.collect()
                storages = [one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor]
                large = {one.data_ptr(): one.nbytes() for one in storages if one.nbytes() >= 2**20}
                held.append(sum(large.values()))

    trained(tmp_path, Wide(), 20)
    second, last = held
    assert last <= second


@pytest.mark.parametrize(
    "value",
    [
        *(np.float16(3), np.longdouble(3), np.int64(3), np.array(3.0, dtype=np.float32), np.array([[3]])),
        *(torch.tensor(3, dtype=torch.uint8), torch.tensor([[3.0]], dtype=torch.bfloat16)),
        *(True, np.bool_(True), torch.tensor(True)),
        # not rounded to float32, and beyond 64 bits
        *(float(BIG), BIG, 10**24, np.int64(BIG), torch.tensor(BIG), torch.tensor(BIG, dtype=torch.float64)),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', None)}",
)
@pytest.mark.parametrize("reduce_fx", ["mean", "sum"])
def test_numbers_of_every_kind(tmp_path: Path, value: Any, reduce_fx: str) -> None:  # I-01
    step, logger = logs(value, **BOTH, reduce_fx=reduce_fx, batch_size=np.int64(2)), Kept()
    trainer = trained(tmp_path, step, 2, logger=logger)
    number = float(value.double() if isinstance(value, torch.Tensor) else np.asarray(value).reshape(()))
    assert metrics(trainer) == dict.fromkeys(("it", "it_step", "it_epoch"), number)
    assert logger.of("it_step") == logger.of("it_epoch") == [(1, number)]
    assert trainer.validate(Logging(None, step), loader(2), verbose=False) == [{"it_epoch": number}]


@pytest.mark.parametrize("count", [0, np.int64(0), 0.0, torch.tensor(0)])
def test_a_value_without_weight_enters_no_mean_and_is_no_step_value(tmp_path: Path, count: Any) -> None:
    # I-01, S-06: it does enter sums, and is a largest or smallest value
    def train(self: Any, batch: Any, batch_idx: int) -> None:
        for name, missing in (("middle", 1), ("last", 2)):
            value = float("nan") if batch_idx == missing else 2.0 + batch_idx
            size = count if batch_idx == missing else count + 1
            self.log(f"host_{name}", value, on_epoch=True, batch_size=size)
            self.log(f"device_{name}", torch.tensor(value), on_epoch=True, batch_size=size)
        for reduce_fx in ("sum", "max", "min"):
            options = {**EPOCH, "reduce_fx": reduce_fx, "batch_size": count}
            self.log(f"host_{reduce_fx}", float(batch_idx), **options)
            self.log(f"device_{reduce_fx}", torch.tensor(float(batch_idx)), **options)
        self.log("nothing", 1.0, **EPOCH, batch_size=0)

    found = metrics(trained(tmp_path, train, 6))
    for kind in ("host", "device"):
        assert [found[f"{kind}_{name}"] for name in ("middle_epoch", "middle_step")] == [3.0, 4.0]
        assert [found[f"{kind}_{name}"] for name in ("last_epoch", "last_step")] == [2.5, 3.0]
        assert [found[f"{kind}_{reduce_fx}"] for reduce_fx in ("sum", "max", "min")] == [3.0, 2.0, 0.0]
    assert "nothing" not in found


def log_metric(module: Any) -> None:
    module.log("mean", module.mean, **EPOCH)


def log_computed(module: Any) -> None:
    module.log("by_hand", module.mean.compute())


def reset(module: Any) -> None:
    module.mean.reset()


def use(module: Any) -> None:
    module.mean.update(8.0)


@pytest.mark.parametrize(
    ("at_start", "in_step", "at_end", "expected"),
    [
        ([log_metric], [], [], {"mean": 2.0}),
        ([], [log_metric], [use, log_metric], {"mean": (0 + 1 + 2 + 3 + 4 + 8) / 6}),
        ([], [log_metric], [log_computed, reset], {"mean": 2.0, "by_hand": 2.0}),
        ([], [log_metric], [log_metric, reset], {"mean": 2.0}),
        ([], [], [log_metric, reset], {"mean": 2.0}),
        ([], [log_metric], [reset, use], {"mean": 2.0}),
        ([], [], [log_metric, reset, use], {"mean": 2.0}),
    ],
)
def test_a_metric_has_its_value_when_last_logged_or_reset(
    tmp_path: Path, at_start: list[Any], in_step: list[Any], at_end: list[Any], expected: dict[str, float]
) -> None:  # I-01
    def calling_each(functions: list[Any]) -> Any:
        return lambda module: [function(module) for function in functions]

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[:, 0])
        calling_each(in_step)(self)

    hooks = {f"on_{stage}_epoch_start": calling_each(at_start) for stage in ("train", "validation")}
    hooks |= {f"on_{stage}_epoch_end": calling_each(at_end) for stage in ("train", "validation")}
    module, trainer = Metered(step, step, **hooks), fit(tmp_path, max_epochs=2)
    for _ in range(2):  # the next epoch has its own value
        assert trainer.validate(module, loader(5), verbose=False) == [expected]
    trainer.fit(module, loader(5))
    assert metrics(trainer) == expected


def measuring(*keys: str) -> Any:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[:, 0])
        for key in keys:
            self.log(key, self.mean, **EPOCH)

    return step


def test_a_metric_object_has_one_name_in_one_stage(tmp_path: Path) -> None:  # S-06
    module = Metered(measuring("train"), measuring("val"))
    trainer = fit(tmp_path, max_epochs=2, num_sanity_val_steps=1)
    trainer.validate(module, loader(3), verbose=False)
    trainer.fit(module, loader(5))  # another run may log it under another name
    assert trainer.global_step == 6
    with pytest.raises(ConfigurationError, match=r"'mean', which was logged as 'val' in the stage 'validate'"):
        trainer.fit(module, loader(5), loader(3))
    assert trainer.global_step == 0
    for keys, loaders, named in (
        (["val", "again"], 1, "which was logged as 'val' in"),
        (["val"], 2, "'val/dataloader_idx_0' in"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            trainer.validate(Metered(None, measuring(*keys)), [loader(3)] * loaders, verbose=False)


def test_step_values_and_the_epoch_value_may_have_keys_of_their_own(tmp_path: Path) -> None:  # I-01
    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean(batch[:, 0])
        self.log("by step", self.mean)

    module = Metered(train, on_train_epoch_end=lambda self: self.log("by epoch", self.mean))
    assert metrics(trained(tmp_path, module, 5)) == {"by step": 4.0, "by epoch": 2.0}


@pytest.mark.parametrize("options", [{}, EPOCH], ids=["by step", "by epoch"])
@pytest.mark.parametrize(("dicts", "named"), [(True, "a dict"), (False, r"shape \(2,\)")])
def test_a_metric_of_several_numbers_is_refused(tmp_path: Path, options: Any, dicts: bool, named: str) -> None:  # I-01
    class Pair(torchmetrics.MeanMetric):
        def compute(self) -> Any:
            value = super().compute()
            return {"a": value, "b": value} if dicts else torch.stack([value, value])

    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean(batch[:, 0])
        self.log("pair", self.mean, **options)

    module = Metered(train)
    module.mean = Pair()
    with pytest.raises(ConfigurationError, match=rf"log\('pair'\) was given a Pair, which computes {named}"):
        trained(tmp_path, module)
    assert len(module.seen) == (2 if options else 0)


@pytest.mark.parametrize(
    ("first", "then", "named"),
    [("number", "mean", "a MeanMetric"), ("mean", "number", "a float"), ("mean", "other", "a MeanMetric")],
)
def test_a_key_keeps_its_kind(tmp_path: Path, first: str, then: str, named: str) -> None:  # I-01
    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(1.0)
        self.other.update(2.0)
        self.log("it", getattr(self, then if batch_idx else first), **EPOCH)

    module: Any = Metered(train)
    module.other, module.number = torchmetrics.MeanMetric(), 1.0
    with pytest.raises(ConfigurationError, match=rf"log\('it'\) was given {named}(?s:.)*before"):
        trained(tmp_path, module)


def test_a_metric_recreated_under_its_name_is_the_same_one(tmp_path: Path) -> None:  # I-01
    def train(self: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[:, 0] + 10 * self.current_epoch)
        self.log("it", self.mean, **EPOCH)

    def renew(self: Any) -> None:
        self.mean = torchmetrics.MeanMetric()

    assert metrics(trained(tmp_path, Metered(train, on_train_epoch_start=renew), 5, max_epochs=2)) == {"it": 12.0}


def test_saving_a_metric_whose_value_has_a_graph(tmp_path: Path) -> None:  # I-01
    class Measuring(Metered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.mean(loss)
            self.log("it", self.mean, **BOTH)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / f"saved-{self.global_step}")

    torch.manual_seed(1)
    whole, resumed = fit(tmp_path), fit(tmp_path)
    whole.fit(Measuring(), loader(8))
    resumed.fit(Measuring(), loader(8), ckpt_path=tmp_path / "saved-2")
    assert resumed.callback_metrics == whole.callback_metrics
    assert not any(value.requires_grad for value in whole.callback_metrics.values())
