"""A logged value is the value at the time of the call, and logging keeps no other tensor alive (I-01)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from engine_case import Tiny, fit, loader
from small_modules import tiny
from test_logging import Kept, Logging, Metered

from drivetrain import ConfigurationError
from drivetrain.callbacks import LambdaCallback

BIG = 2**24 + 1  # the first integer that float32 cannot represent


class TestChangedAfterwards:
    """I-01."""

    def test_a_loss_changed_in_place(self, tmp_path: Path) -> None:
        steps: list[tuple[float, float, int]] = []

        class Regularised(Tiny):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = (self.layer(batch) - batch[:, :1]).square().mean()
                ce = loss.item()
                self.log("ce", loss, on_step=True, on_epoch=True)
                loss += 100 * self.layer.weight.square().sum()
                self.log("total", loss, on_step=True, on_epoch=True)
                steps.append((ce, loss.item(), len(batch)))
                return loss

        logger = Kept()
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1)
        runner.fit(Regularised(lr=1e-3), loader(5))
        for index, name in enumerate(("ce", "total")):
            assert logger.of(f"{name}_step") == [(number, step[index]) for number, step in enumerate(steps, 1)]
            expected = sum(step[index] * step[2] for step in steps) / 5
            assert float(runner.callback_metrics[f"{name}_epoch"]) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_a_parameter_of_one_element(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        """CLIP's ``logit_scale``: the optimizer changes it after the call."""
        seen: list[float] = []

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            seen.append(self.scale.item())
            self.log("scale", self.scale, on_step=True, on_epoch=True)
            return (self.scale * self.layer(batch)).square().mean()

        module = tiny(training_step=training_step, lr=0.1)
        module.scale, module.lr = torch.nn.Parameter(torch.ones(shape)), 0.1
        logger = Kept()
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1)
        runner.fit(module, loader(8))
        assert len(set(seen)) == 4  # it changes
        assert logger.of("scale_step") == list(enumerate(seen, 1))
        assert float(runner.callback_metrics["scale_epoch"]) == pytest.approx(sum(seen) / 4, rel=1e-12)
        assert float(runner.callback_metrics["scale_step"]) == seen[-1]

    def test_a_reused_array(self, tmp_path: Path) -> None:
        scratch = np.zeros(())

        def train(self: Any, batch: Any, batch_idx: int) -> None:
            scratch[...] = batch_idx + 1
            self.log("it", scratch, on_step=False, on_epoch=True, reduce_fx="sum")

        runner = fit(tmp_path)
        runner.fit(Logging(train), loader(8))
        assert float(runner.callback_metrics["it"]) == 1 + 2 + 3 + 4

    def test_a_reused_weight_tensor(self, tmp_path: Path) -> None:
        """A count of tokens is often a tensor; like a value, it is not read."""
        count = torch.zeros((), dtype=torch.long)

        def train(self: Any, batch: Any, batch_idx: int) -> None:
            count.fill_(batch_idx + 1)
            for number in (False, True):
                value = float(batch[:, 0].mean()) if number else batch[:, 0].mean()
                self.log(f"it_{number}", value, on_step=False, on_epoch=True, batch_size=count)

        runner = fit(tmp_path)
        runner.fit(Logging(train), loader(5))
        for name in ("it_True", "it_False"):
            assert float(runner.callback_metrics[name]) == pytest.approx((0.5 * 1 + 2.5 * 2 + 4 * 3) / 6)

    def test_changes_to_a_read_value_have_no_effect(self, tmp_path: Path) -> None:
        """A hook that shows percents must not change what decides later."""

        def to_percents(trainer: Any, *_: Any) -> None:
            for read in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
                for name in read:
                    read[name] *= 100

        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", batch[:, 0].mean(), on_step=True, on_epoch=True, prog_bar=True)

        runner = fit(tmp_path, callbacks=LambdaCallback(on_train_batch_end=to_percents, on_train_end=to_percents))
        runner.fit(Logging(train), loader(5))
        found = {name: float(value) for name, value in runner.callback_metrics.items()}
        assert found == {"it": 2.0, "it_epoch": 2.0, "it_step": 4.0}


class TestNothingElseIsKept:
    """I-01."""

    def test_a_view_of_an_activation_does_not_keep_the_activation(self, tmp_path: Path) -> None:
        held: list[int] = []

        class Wide(Tiny):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                wide = self.layer(batch).expand(2, 2**17) * 1.0  # 1 MiB
                self.log("view", wide[0, 0], on_step=True, on_epoch=True)
                self.log("slice", wide[:1, :1], on_step=True, on_epoch=True)
                return wide.mean()

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx not in (1, 19):
                    return
                gc.collect()
                storages = {
                    thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
                    for thing in gc.get_objects()
                    if type(thing) is torch.Tensor
                }
                held.append(sum(nbytes for nbytes in storages.values() if nbytes >= 2**20))

        fit(tmp_path).fit(Wide(), loader(40))
        second, last = held
        assert last <= second


class TestNumbers:
    """I-01."""

    @pytest.mark.parametrize(
        "value",
        [
            *(np.float16(3), np.longdouble(3), np.int64(3), np.array(3.0, dtype=np.float32), np.array([[3]])),
            *(torch.tensor(3, dtype=torch.uint8), torch.tensor([[3.0]], dtype=torch.bfloat16)),
            *(True, np.bool_(True), torch.tensor(True)),
        ],
        ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', None)}",
    )
    def test_numbers_of_every_kind(self, tmp_path: Path, value: Any) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", value, on_step=True, on_epoch=True, batch_size=np.int64(2))

        logger = Kept()
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1)
        runner.fit(Logging(train), loader(4))
        number = float(np.asarray(value.float() if isinstance(value, torch.Tensor) else value).reshape(()))
        assert {name: float(read) for name, read in runner.callback_metrics.items()} == dict.fromkeys(
            ("it", "it_step", "it_epoch"), number
        )
        assert logger.of("it_step") == [(1, number), (2, number)]

    @pytest.mark.parametrize(
        "kind",
        [float, int, np.int64, torch.tensor, lambda value: torch.tensor(value, dtype=torch.float64)],
        ids=["float", "int", "int64", "tensor", "double"],
    )
    @pytest.mark.parametrize("reduce_fx", ["mean", "sum"])
    def test_what_does_not_fit_in_float32_is_not_rounded_to_it(
        self, tmp_path: Path, kind: Callable[[int], Any], reduce_fx: str
    ) -> None:
        def step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", kind(BIG), on_step=True, on_epoch=True, reduce_fx=reduce_fx)

        logger = Kept()
        runner = fit(tmp_path, logger=logger, log_every_n_steps=1)
        runner.fit(Logging(step), loader(2))
        assert {name: float(read) for name, read in runner.callback_metrics.items()} == dict.fromkeys(
            ("it", "it_step", "it_epoch"), float(BIG)
        )
        assert logger.of("it_step") == logger.of("it_epoch") == [(1, float(BIG))]
        assert runner.validate(Logging(None, step), loader(2), verbose=False) == [{"it_epoch": float(BIG)}]

    def test_whole_numbers_beyond_64_bits(self, tmp_path: Path) -> None:
        """The FLOPs of a large training."""
        runner = fit(tmp_path)
        runner.fit(Logging(lambda self, *_: self.log("flops", 10**24, on_epoch=True, reduce_fx="sum")), loader(4))
        assert float(runner.callback_metrics["flops_step"]) == 1e24
        assert float(runner.callback_metrics["flops_epoch"]) == 2e24


class TestWeights:
    """I-01."""

    @pytest.mark.parametrize(("reduce_fx", "expected"), [("sum", 3.0), ("max", 2.0), ("min", 0.0)])
    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_a_weight_of_0_is_for_means(
        self, tmp_path: Path, reduce_fx: str, expected: float, kind: Callable[[float], Any]
    ) -> None:
        def step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("it", kind(float(batch_idx)), on_step=False, on_epoch=True, reduce_fx=reduce_fx, batch_size=0)

        runner = fit(tmp_path)
        runner.fit(Logging(step), loader(6))
        assert {name: float(read) for name, read in runner.callback_metrics.items()} == {"it": expected}
        assert runner.validate(Logging(None, step), loader(6), verbose=False) == [{"it": expected}]

    @pytest.mark.parametrize("weight", [-1, -0.5, np.int64(-1), float("nan")])
    def test_a_weight_below_0_is_refused(self, tmp_path: Path, weight: Any) -> None:
        module = Logging(lambda self, *_: self.log("it", 1.0, on_epoch=True, batch_size=weight))
        with pytest.raises(ConfigurationError, match=r"log\('it', batch_size=(np.int64\()?(-1|-0\.5|nan)"):
            fit(tmp_path).fit(module, loader(4))


class Measured(Tiny):
    """Measures the mean of the sample numbers; ``at_end`` names what it does in the epoch's last hook."""

    def __init__(self, *at_end: str, in_step: bool = False) -> None:
        super().__init__()
        self.mean, self.first = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self.at_end, self.in_step = at_end, in_step

    def _step(self, batch: Any) -> None:
        self.mean.update(batch[:, 0])
        self.first.update(batch[:, 0].max() if not len(self.first.value) else batch[:0, 0])
        if self.in_step:
            self.log_metrics()

    def log_metrics(self) -> None:
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("first", self.first, on_step=False, on_epoch=True)

    def compute(self) -> None:
        self.log("by_hand", self.mean.compute())

    def reset(self) -> None:
        self.mean.reset()
        self.first.reset()

    def use(self) -> None:
        self.mean.update(8.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._step(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._step(batch)

    def on_train_epoch_end(self) -> None:
        for name in self.at_end:
            getattr(self, name)()

    on_validation_epoch_end = on_train_epoch_end


class TestMetricObjects:
    """I-01."""

    def _measuring(self, *keys: str) -> Any:
        """Return a step that logs the module's metric under ``keys``."""

        def step(self: Any, batch: Any, batch_idx: int) -> None:
            self.mean.update(batch[:, 0])
            for key in keys:
                self.log(key, self.mean, on_step=False, on_epoch=True)

        return step

    @pytest.mark.parametrize(
        ("at_end", "in_step"),
        [
            (["reset"], True),
            (["compute", "reset"], True),
            (["log_metrics", "reset"], True),
            (["log_metrics", "reset"], False),
            (["reset", "use"], True),
            (["log_metrics", "reset", "use"], False),
        ],
    )
    def test_a_metric_reset_by_hand_after_logging(self, tmp_path: Path, at_end: list[str], in_step: bool) -> None:
        """Code that computes a metric by hand also resets it; if it was logged too, its value was NaN."""
        module = Measured(*at_end, in_step=in_step)
        expected = {"mean": 2.0, "first": 1.0} | ({"by_hand": 2.0} if "compute" in at_end else {})
        runner = fit(tmp_path, max_epochs=2)
        for _ in range(2):  # the next epoch has its own value
            assert runner.validate(module, loader(5), verbose=False) == [expected]
        runner.fit(module, loader(5))
        assert {name: float(value) for name, value in runner.callback_metrics.items()} == expected

    def test_a_metric_logged_again_in_the_hook_has_its_current_value(self, tmp_path: Path) -> None:
        module = Measured("use", "log_metrics", in_step=True)
        assert fit(tmp_path).validate(module, loader(5), verbose=False)[0]["mean"] == (0 + 1 + 2 + 3 + 4 + 8) / 6

    def test_a_metric_logged_before_the_first_batch_is_for_the_epoch(self, tmp_path: Path) -> None:
        class Early(Measured):
            on_validation_epoch_start = Measured.log_metrics

        assert fit(tmp_path).validate(Early(), loader(5), verbose=False) == [{"mean": 2.0, "first": 1.0}]

    def test_one_object_in_an_evaluation_and_in_a_fit(self, tmp_path: Path) -> None:
        """Validation left it with tensors that training could not accumulate into."""
        module = Metered(self._measuring("train"), self._measuring("val"))
        runner = fit(tmp_path, max_epochs=2, num_sanity_val_steps=1, check_val_every_n_epoch=2)
        runner.validate(module, loader(3), verbose=False)
        runner.fit(module, loader(5))
        assert runner.global_step == 6
        # S-06: within one run, it has one name in one stage
        named = r"'mean', which was logged as 'val' in another stage \('validate'"
        with pytest.raises(ConfigurationError, match=named):
            runner.fit(module, loader(5), loader(3))
        assert runner.global_step == 0

    @pytest.mark.parametrize(
        ("keys", "loaders", "named"),
        [
            (["val", "again"], 1, r"which was logged as 'val'\."),
            (["val"], 2, "'val/dataloader_idx_0', for another loader"),
        ],
    )
    def test_one_object_under_two_keys_or_for_two_loaders_is_refused(
        self, tmp_path: Path, keys: list[str], loaders: int, named: str
    ) -> None:
        # S-06
        with pytest.raises(ConfigurationError, match=named):
            fit(tmp_path).validate(Metered(None, self._measuring(*keys)), [loader(3)] * loaders, verbose=False)

    def test_step_values_and_the_epoch_value_may_have_keys_of_their_own(self, tmp_path: Path) -> None:
        """As in torchmetrics' documentation of Lightning."""

        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.mean(batch[:, 0])
            self.log("by step", self.mean)

        runner = fit(tmp_path)
        runner.fit(Metered(train, on_train_epoch_end=lambda self: self.log("by epoch", self.mean)), loader(5))
        assert [float(runner.callback_metrics[name]) for name in ("by step", "by epoch")] == [4.0, 2.0]

    @pytest.mark.parametrize("count", [0, torch.tensor(0)])
    def test_a_value_without_weight_does_not_enter_a_mean(self, tmp_path: Path, count: Any) -> None:
        # S-06
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            value = float("nan") if batch_idx == 1 else 2.0 + batch_idx
            size = count if batch_idx == 1 else count + 1
            self.log("host", value, on_step=False, on_epoch=True, batch_size=size)
            self.log("device", torch.tensor(value), on_step=False, on_epoch=True, batch_size=size)
            self.log("nothing", 1.0, on_step=False, on_epoch=True, batch_size=0)

        runner = fit(tmp_path)
        runner.fit(Logging(train), loader(6))
        assert {name: float(read) for name, read in runner.callback_metrics.items()} == {"host": 3.0, "device": 3.0}

    @pytest.mark.parametrize("count", [0, np.int64(0), 0.0, torch.tensor(0)])
    def test_a_value_without_weight_is_no_step_value(self, tmp_path: Path, count: Any) -> None:
        # S-06
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            value = float("nan") if batch_idx == 2 else 2.0 + batch_idx
            self.log("value", value, on_step=True, batch_size=count if batch_idx == 2 else 1)

        runner = fit(tmp_path)
        runner.fit(Logging(train), loader(6))
        assert float(runner.callback_metrics["value"]) == 3.0

    @pytest.mark.parametrize(("dicts", "named"), [(True, "a dict"), (False, r"shape \(2,\)")])
    def test_a_metric_of_several_numbers_is_refused_if_logged_by_step(
        self, tmp_path: Path, dicts: bool, named: str
    ) -> None:
        class Pair(torchmetrics.MeanMetric):
            def compute(self) -> Any:
                value = super().compute()
                return {"a": value, "b": value} if dicts else torch.stack([value, value])

        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.mean(batch[:, 0])
            self.log("pair", self.mean)

        module = Metered(train)
        module.mean = Pair()
        with pytest.raises(ConfigurationError, match=rf"log\('pair'\) was given a Pair, which computes {named}"):
            fit(tmp_path).fit(module, loader(8))
        assert len(module.seen) == 0

    @pytest.mark.parametrize(
        ("first", "then", "named"),
        [("number", "mean", "a MeanMetric"), ("mean", "number", "a float"), ("mean", "other", "a MeanMetric")],
    )
    def test_a_key_keeps_its_kind(self, tmp_path: Path, first: str, then: str, named: str) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.mean.update(1.0)
            self.other.update(2.0)
            self.log("it", getattr(self, then if batch_idx else first), on_step=False, on_epoch=True)

        module: Any = Metered(train)
        module.other, module.number = torchmetrics.MeanMetric(), 1.0
        with pytest.raises(ConfigurationError, match=rf"log\('it'\) was given {named}(?s:.)*before"):
            fit(tmp_path).fit(module, loader(4))

    def test_a_metric_recreated_under_its_name_is_the_same_one(self, tmp_path: Path) -> None:
        def train(self: Any, batch: Any, batch_idx: int) -> None:
            self.mean.update(batch[:, 0] + 10 * self.current_epoch)
            self.log("it", self.mean, on_step=False, on_epoch=True)

        def renew(self: Any) -> None:
            self.mean = torchmetrics.MeanMetric()

        runner = fit(tmp_path, max_epochs=2)
        runner.fit(Metered(train, on_train_epoch_start=renew), loader(5))
        assert float(runner.callback_metrics["it"]) == 12.0

    def test_saving_a_metric_whose_value_has_a_graph(self, tmp_path: Path) -> None:
        """A metric called on the loss keeps the value that it gave: the save failed on it."""

        class Measuring(Metered):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.layer(batch).square().mean()
                self.mean(loss)
                self.log("it", self.mean, on_step=True, on_epoch=True)
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
