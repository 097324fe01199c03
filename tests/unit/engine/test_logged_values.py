"""A logged value is the value at the time of the call, and logging keeps no other tensor alive (I-01)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from engine_case import Tiny, fit, loader
from small_modules import metrics, tiny
from test_logging import BOTH, EPOCH, Kept, Logging, Metered, logs, mean, trained

from drivetrain import ConfigurationError
from drivetrain.callbacks import LambdaCallback

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
    with pytest.raises(ConfigurationError, match=r"'mean', which was logged as 'val' in another stage \('validate'"):
        trainer.fit(module, loader(5), loader(3))
    assert trainer.global_step == 0
    for keys, loaders, named in (
        (["val", "again"], 1, r"which was logged as 'val'\."),
        (["val"], 2, "'val/dataloader_idx_0', for another loader"),
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
