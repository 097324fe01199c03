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
from small_runs import Regression, loader, quiet, refusal, seeded

from drivetrain import Logger
from drivetrain.loggers import CSVLogger
from drivetrain.testing import requires_package
from worlds import on_ranks


class Listing(Logger):
    """A third-party logger that records its calls."""

    name, version = "listing", "0"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.config: dict[str, int] = {}
        self.histograms: dict[str, tuple[int, list[int], list[float]]] = {}

    @property
    def experiment(self) -> Any:
        return self

    def write(self, text: str) -> None:
        self.calls.append(text)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append("metrics")

    def log_text(self, key: str, value: str, step: int) -> None:
        self.calls.append(value)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        assert key not in self.histograms
        self.histograms[key] = (step, list(value.counts), list(value.edges))

    def finalize(self, status: str) -> None:
        self.calls.append(status)


class LogsInAHook(Regression):
    def on_train_start(self) -> None:
        for one in (self.logger, *self.loggers, *self.trainer.loggers):
            one.log_text("text", f"by {self.global_rank}", 0)
        self.logger.experiment.write(f"to the library by {self.global_rank}")
        assert isinstance(self.logger, Listing)
        assert isinstance(self.trainer.loggers[1], CSVLogger)
        assert self.trainer.loggers[1].log_dir == self.trainer.log_dir
        self.logger.experiment.config["x"] = 1 if self.global_rank else self.logger.experiment.write("")
        self.trainer.log_histogram("w", next(iter(self.parameters())))


def _log_in_a_hook(folder: Path) -> list[str]:
    listing = Listing()
    quiet(strategy="fsdp", devices=2, logger=[listing, CSVLogger(folder)]).fit(LogsInAHook(), loader(8, 4))
    return listing.calls


def test_a_value_logged_by_a_hook_on_every_rank_is_written_once(tmp_path: Path) -> None:  # L-04
    calls, others = on_ranks(_log_in_a_hook, 2, tmp_path)
    assert calls == ["by 0", "by 0", "by 0", "to the library by 0", "", "success"]
    assert others == []
    media = tmp_path / "drivetrain_logs/version_0/media"
    assert [path.name for path in media.rglob("*.txt")] == ["step=0.txt"]
    assert sum(json.loads((media / "w/step=0.json").read_text())["counts"]) == 8 * 4  # of the whole tensor


class LogsHistograms(Regression):
    """Logs histograms of its weights on all ranks, and keeps the whole weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(Deep)
        self.register_buffer("scale", torch.arange(5.0))
        self.wholes: dict[str, Any] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {name: one.grad for name, one in self.named_parameters() if one.grad is not None and one.grad.numel()}
        if self.trainer.global_step == 1 and not self.trainer.strategy.name.startswith("deepspeed"):
            self.wholes = {f"grads/{name}": whole(one) for name, one in found.items()}
            self.trainer.log_histogram("grads", found, step=2, bins=16)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step != 2:
            return
        self.wholes |= {f"weights/{name}": whole(one) for name, one in self.trainer.strategy.model_state().items()}
        self.trainer.log_histogram("weights", {**dict(self.named_parameters()), "scale": self.scale}, bins=16)
        own = torch.arange(3.0) + 10 * self.global_rank  # differs between ranks
        self.trainer.log_histogram("own", own, step=7, bins=4)
        self.trainer.log_histogram("one", own if self.global_rank else None, bins=2)
        self.trainer.log_histogram("none", torch.full((3,), float("nan")))
        self.wholes["own"] = np.array([0.0, 1, 2, 10, 11, 12])
        self.wholes["one"] = np.array([10.0, 11, 12])


def whole(value: Any) -> np.ndarray[Any, Any]:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone().float().numpy()


def _histograms(strategy: str, precision: str) -> Any:
    listing, module = Listing(), LogsHistograms()
    quiet(strategy=strategy, devices=2, logger=listing, precision=precision).fit(module, loader(16, 4))
    return listing.histograms, module.wholes


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", "32-true"),
        ("fsdp", "bf16-true"),
        pytest.param("deepspeed_stage_3", "32-true", marks=requires_package("deepspeed")),
        pytest.param("deepspeed_stage_2", "32-true", marks=requires_package("deepspeed")),
    ],
)
def test_histograms_are_of_the_whole_tensors(strategy: str, precision: str) -> None:
    # L-04: counts equal numpy.histogram of the whole tensor
    (found, wholes), (others, _) = on_ranks(_histograms, 2, strategy, precision)
    assert others == {}
    assert found.keys() == wholes.keys()  # nothing for "none", which has no finite number
    assert len(wholes) > (20 if strategy.startswith("deepspeed") else 40)
    for name, values in wholes.items():
        counts, edges = np.histogram(values, {"own": 4, "one": 2}.get(name, 16))
        assert found[name] == (7 if name == "own" else 2, counts.tolist(), edges.tolist()), name


class LogsAList(Regression):
    def on_train_start(self) -> None:
        self.trainer.log_histogram("weights", {"a": torch.ones(1), "b": [1] if self.global_rank else torch.ones(1)})


def _log_a_list() -> str:
    return refusal(LogsAList(), loader(8, 4), strategy="ddp", devices=2, logger=Listing())


def test_a_value_that_is_no_tensor_is_refused_on_every_rank() -> None:
    for text in on_ranks(_log_a_list, 2):
        assert text.startswith("ConfigurationError")
        assert "weights/b: a list" in text
