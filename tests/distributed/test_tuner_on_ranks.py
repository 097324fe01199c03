"""The tuner on two ranks: both get the same result, and the run afterwards is not affected. Row L-06."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Regression, each, loader, quiet, refusal, weights
from test_own_mistakes import Buggy
from torch import nn

from drivetrain.callbacks import LearningRateFinder
from drivetrain.testing import requires_package
from drivetrain.tuner import Tuner
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


class Drawing(Regression):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.net.append(nn.BatchNorm1d(1))
        self.net.insert(1, nn.Dropout(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def _trained(strategy: str, search: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    module, fit, data = Drawing(), quiet(strategy=strategy, max_epochs=2), loader(22, 3, shuffle=True)
    found: dict[str, Any] = {}
    if search:
        results = Tuner(fit).lr_find(module, data, num_training=12, update_attr=False).results
        assert len(results["loss"]) == 12
        found = {"results": results, "size": Tuner(fit).scale_batch_size(module, data, init_val=2, max_trials=2)}
    fit.fit(module, data)
    return found | {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: float(one) for name, one in fit.callback_metrics.items()},
        "rng_states": torch.rand(3),
        "counters": (fit.global_step, fit.current_epoch, fit.samples_seen, fit.micro_batches),
        "rates": [one.get_last_lr() for one in fit.lr_schedulers],
    }


ZERO_3 = pytest.param("deepspeed_stage_3", marks=requires_package("deepspeed"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", ZERO_3])
def test_a_run_after_a_search_is_the_run_without_one(strategy: str) -> None:  # L-06
    ranks = on_ranks(each, 2, _trained, (strategy, False), (strategy, True), process_group=None, timeout=150)
    results = [(after.pop("results"), after.pop("size")) for _, after in ranks]
    assert results[0] == results[1] == (results[0][0], 4)
    for plain, after in ranks:
        torch.testing.assert_close(after, plain, rtol=0, atol=0)


class OutOfMemory(Regression):
    """Runs out of memory above a batch size that differs between ranks."""

    def __init__(self, *most: int) -> None:
        super().__init__()
        self.most = most
        self.batch_size = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > self.most[self.trainer.global_rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch))


def _sizes() -> list[int]:
    sizes = []
    for strategy in ("ddp", "fsdp"):
        module = OutOfMemory(64, 11)
        options: dict[str, Any] = {"mode": "binsearch", "steps_per_trial": 2}
        sizes.append(Tuner(quiet(strategy=strategy)).scale_batch_size(module, loader(200, 4), **options))
        assert module.batch_size == sizes[-1]
    with pytest.raises(Exception, match="batch size 1 ") as caught:
        Tuner(quiet(strategy="ddp")).scale_batch_size(OutOfMemory(64, 0), loader(200, 4))
    assert type(caught.value).__name__ == "ConfigurationError"
    one_sample: dict[str, Any] = {"dataloaders": loader(1, 4), "method": "validate"}
    sizes.append(Tuner(quiet(strategy="ddp")).scale_batch_size(OutOfMemory(64, 64), **one_sample))
    sizes.append(Tuner(quiet(strategy="ddp")).scale_batch_size(OutOfMemory(64, 64), loader(21, 4)))  # all the data
    return sizes


def test_the_batch_size_fits_on_every_rank() -> None:  # L-06
    assert on_ranks(_sizes, 2, process_group=None, timeout=150) == [[11, 11, 1, 11]] * 2


def _losses(batch_size: int) -> list[float]:
    options: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 0.1, "num_training": 11, "update_attr": False}
    return Tuner(quiet()).lr_find(Regression(), loader(42, batch_size), **options).results["loss"]


def _searching() -> tuple[list[float], float, float | None]:
    module = Buggy("second forward", ranks=(1,))
    with pytest.raises(Exception, match="mat1 and mat2 shapes"):
        Tuner(quiet(strategy="ddp")).lr_find(module, loader(64, 4))
    assert torch.equal(weights(module), weights(Regression()))
    finder, sound = LearningRateFinder(num_training_steps=15), Regression()
    assert refusal(sound, loader(64, 4), strategy="ddp", callbacks=[finder]).startswith("nothing was raised")
    assert finder.optimal_lr is not None
    return _losses(4), sound.lr, finder.optimal_lr.suggestion()


def test_losses_are_over_the_samples_of_all_ranks_and_an_error_on_one_fails_on_all() -> None:  # L-06
    first, second = on_ranks(_searching, 2, process_group=None, timeout=100)
    assert first == second
    assert first[0] == pytest.approx(_losses(8), rel=1e-5)
    assert first[1] == first[2]


def test_started_processes_return_the_result_of_a_search() -> None:  # L-06
    fit, module = quiet(strategy="ddp", devices=2, launcher="forkserver"), OutOfMemory(64, 5)
    found = Tuner(fit).lr_find(module, loader(64, 4), num_training=15)
    assert len(found.results["loss"]) == 15
    assert module.lr == found.suggestion()
    assert torch.equal(weights(module), weights(OutOfMemory()))
    assert Tuner(fit).scale_batch_size(module, loader(64, 4), init_val=4, max_trials=2) == module.batch_size == 4
