"""Loggers on several ranks: hooks log once, and histograms of sharded weights are those of the whole tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_nets import Deep
from small_runs import Regression, loader, quiet, seeded

from drivetrain import Logger
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger
from drivetrain.testing import requires_package
from worlds import on_ranks


class Listing(Logger):
    """A third-party logger that records its calls."""

    name, version = "listing", "0"

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def experiment(self) -> Any:
        return self

    def write(self, text: str) -> None:
        self.calls.append(text)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append("metrics")

    def log_text(self, key: str, value: str, step: int) -> None:
        self.calls.append(value)

    def finalize(self, status: str) -> None:
        self.calls.append(status)


class Talking(Regression):
    def on_train_start(self) -> None:
        for one in (self.logger, *self.loggers, *self.trainer.loggers):
            one.log_text("said", f"by {self.global_rank}", 0)
        self.logger.experiment.write(f"to the library by {self.global_rank}")
        assert isinstance(self.logger, Listing)
        assert isinstance(self.trainer.loggers[1], CSVLogger)
        assert self.trainer.loggers[1].log_dir == self.trainer.log_dir
        self.logger.experiment.config["x"] = 1 if self.global_rank else self.logger.experiment.write("")


def _talk(folder: Path) -> tuple[list[str], str]:
    listing = Listing()
    listing.config = {}  # type: ignore[attr-defined]
    fit = quiet(strategy="ddp", devices=2, logger=[listing, CSVLogger(folder)])
    fit.fit(Talking(), loader(8, 4))
    return listing.calls, type(listing).__name__


def test_a_value_logged_by_a_hook_on_every_rank_is_written_once(tmp_path: Path) -> None:
    # L-04
    (calls, _), (others, kind) = on_ranks(_talk, 2, tmp_path)
    assert calls == ["by 0", "by 0", "by 0", "to the library by 0", "", "success"]
    assert others == []
    assert kind == "Listing"
    media = tmp_path / "drivetrain_logs/version_0/media"
    assert [path.name for path in media.rglob("*.txt")] == ["step=0.txt"]


class Weighed(Regression):
    """Logs histograms of its weights on all ranks, and records the whole weights on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Deep)
        self.register_buffer("scale", torch.arange(5.0))
        self.wholes: dict[str, Any] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {name: one.grad for name, one in self.named_parameters() if one.grad is not None and one.grad.numel()}
        if self.trainer.global_step == 1 and not self.trainer.strategy.name.startswith("deepspeed"):
            self.wholes = {f"grads/{name}": _whole(one).clone() for name, one in found.items()}
            self.trainer.log_histogram("grads", found, step=2, bins=16)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 2:
            return
        state = {name: _whole(value) for name, value in self.trainer.strategy.model_state().items()}
        self.wholes |= {f"weights/{name}": value.clone() for name, value in state.items()}
        self.trainer.log_histogram("weights", {**dict(self.named_parameters()), "scale": self.scale}, bins=16)
        own = torch.arange(3.0) + 10 * self.global_rank  # differs between ranks
        self.trainer.log_histogram("own", own, step=7, bins=4)
        self.trainer.log_histogram("one", own if self.global_rank else None, bins=2)
        self.trainer.log_histogram("none", torch.full((3,), float("nan")))
        self.wholes["own"] = torch.tensor([0.0, 1, 2, 10, 11, 12])
        self.wholes["one"] = torch.tensor([10.0, 11, 12])


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor().detach() if hasattr(value, "full_tensor") else value.detach()


class Counting(Logger):
    name, version = "counting", "0"

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, list[int], list[float]]] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        assert key not in self.found
        self.found[key] = (step, list(value.counts), list(value.edges))


def _weigh(strategy: str, options: dict[str, Any]) -> Any:
    counting, module = Counting(), Weighed()
    quiet(strategy=strategy, devices=2, logger=counting, **options).fit(module, loader(16, 4))
    return counting.found, {name: value.float().numpy() for name, value in module.wholes.items()}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("fsdp", {"precision": "bf16-true"}),
        pytest.param("deepspeed_stage_3", {}, marks=requires_package("deepspeed")),
        pytest.param("deepspeed_stage_2", {}, marks=requires_package("deepspeed")),
    ],
)
def test_histograms_are_of_the_whole_tensors(strategy: str, options: dict[str, Any]) -> None:
    # L-04: counts equal numpy.histogram of the whole tensor
    (found, wholes), (others, _) = on_ranks(_weigh, 2, strategy, options)
    assert others == {}
    assert found.keys() == wholes.keys()  # nothing for "none", which has no finite number
    assert len(wholes) > (20 if strategy.startswith("deepspeed") else 40)
    for name, whole in wholes.items():
        step, counts, edges = found[name]
        assert step == (7 if name == "own" else 2), name
        wanted, wanted_edges = np.histogram(whole, {"own": 4, "one": 2}.get(name, 16))
        assert counts == wanted.tolist(), name
        assert edges == wanted_edges.tolist(), name


class Wrong(Regression):
    def on_train_start(self) -> None:
        self.trainer.log_histogram("weights", {"a": torch.ones(1), "b": [1] if self.global_rank else torch.ones(1)})


def _give_no_tensor() -> str:
    with pytest.raises(ConfigurationError) as caught:
        quiet(strategy="ddp", devices=2, logger=Counting()).fit(Wrong(), loader(8, 4))
    return str(caught.value)


def test_a_value_that_is_no_tensor_is_refused_on_every_rank() -> None:
    said = on_ranks(_give_no_tensor, 2)
    assert all("weights/b: a list" in text for text in said)


def test_a_csv_logger_gets_the_whole_tensors(tmp_path: Path) -> None:
    # L-04
    on_ranks(_keep, 2, tmp_path)
    (file,) = tmp_path.rglob("media/w/step=0.json")
    assert sum(json.loads(file.read_text())["counts"]) == 8 * 4


class Keeping(Regression):
    def on_train_start(self) -> None:
        self.trainer.log_histogram("w", next(iter(self.parameters())))


def _keep(folder: Path) -> None:
    quiet(strategy="fsdp", devices=2, logger=CSVLogger(folder)).fit(Keeping(), loader(8, 4))
