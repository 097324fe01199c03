"""State that cannot be saved, and a place that cannot be written to, are found before the first step. J-08."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader
from small_modules import tiny

from drivetrain import Callback, CheckpointError, ConfigurationError, DataModule
from drivetrain.callbacks import Checkpoint


class Stateful(Callback):
    def __init__(self, state: Any = None, extra: Any = None) -> None:
        self.state, self.extra = state, extra

    def state_dict(self) -> dict[str, Any]:
        return {} if self.state is None else {"own": self.state}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.extra is not None:
            checkpoint["own"] = self.extra


class Queued(DataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def state_dict(self) -> dict[str, Any]:
        return {"queue": collections.deque([1])}


def with_buffer(value: torch.Tensor) -> Tiny:
    module = Tiny()
    module.register_buffer("odd", value)
    return module


def with_hyper_parameter(value: Any) -> Tiny:
    module = Tiny()
    module.save_hyperparameters({"shape": value})
    return module


def save_vocabulary(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["vocabulary"] = frozenset("ab")


def with_group(self: Any) -> Any:
    return torch.optim.SGD([{"params": self.parameters(), "schedule": lambda step: 0.1}], lr=0.1)


def with_foreign_state(key: Any) -> Tiny:
    """A module whose optimizer has state for something that is not a parameter of the module."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.state[key]["sum"] = torch.zeros(1)
        return optimizer

    return tiny(configure_optimizers=configure_optimizers)


Shape = collections.namedtuple("Shape", "width height")


@pytest.mark.parametrize(
    ("module", "part", "named"),
    [
        (lambda: with_buffer(torch.zeros(2, dtype=torch.complex128)), None, "odd.*complex128"),
        (lambda: with_buffer(torch.eye(2).to_sparse()), None, "odd.*sparse"),
        (lambda: with_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)), None, "odd.*quint8"),
        (lambda: with_hyper_parameter(Shape(1, 2)), None, "hyper_parameters/shape.*Shape"),
        (lambda: with_hyper_parameter("é" * 2**24), None, "manifest.json would have"),
        (lambda: tiny(on_save_checkpoint=save_vocabulary), None, "module/vocabulary.*frozenset"),
        (lambda: tiny(configure_optimizers=with_group), None, "param_groups/0/schedule.*function"),
        (lambda: with_foreign_state(torch.zeros(3)), None, r"SGD holds a tensor of shape \(3,\)"),
        (lambda: with_foreign_state("all"), None, "SGD holds 'all'"),
        (Tiny, Queued(), "datamodule/queue.*deque"),
        (Tiny, Stateful({1, 2}), "callbacks/Stateful/own.*set"),
        (Tiny, Stateful(10**5000), "cannot be saved.*integer"),
        (Tiny, Stateful(extra=len), "callback_hooks/Stateful/own.*builtin"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_by_name(tmp_path: Path, module: Any, part: Any, named: str) -> None:
    trained = module()
    callbacks = [Checkpoint(tmp_path / "c"), *([part] if isinstance(part, Callback) else [])]
    with pytest.raises(CheckpointError, match=named):
        fit(tmp_path, callbacks=callbacks).fit(trained, part if isinstance(part, DataModule) else loader())
    assert trained.seen == []
    assert not (tmp_path / "c").exists()


def test_without_full_checkpoints_state_is_not_checked(tmp_path: Path) -> None:
    weights = Checkpoint(tmp_path / "c", save_weights_only=True)
    for saving in ([], [weights]):
        fit(tmp_path, callbacks=[*saving, Stateful({1, 2})]).fit(tiny(on_save_checkpoint=save_vocabulary), loader())
    assert weights.best_model_path


def test_a_hook_that_fails_only_before_training_is_accepted(tmp_path: Path) -> None:
    def save_loss(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = float(self.trainer.callback_metrics["loss"])

    module = tiny(on_save_checkpoint=save_loss, on_train_batch_end=lambda self, *_: self.log("loss", 1.0))
    saver = Checkpoint(tmp_path / "c")
    fit(tmp_path, callbacks=saver).fit(module, loader())
    assert saver.best_model_path


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("nobody://bucket/c", "nobody"),
        ("hdfs://host/c", "pyarrow|hdfs|libhdfs|JVM|Java"),
        ("faulty://store/c", r"Checkpoint cannot write to 'faulty://store/c'.*no right to put"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, store: Any, url: str, named: str) -> None:
    store.fail("put", error=PermissionError("no right to put objects"), times=None)
    module = Tiny()
    with pytest.raises((ConfigurationError, CheckpointError), match=named):
        fit(tmp_path, callbacks=Checkpoint(url)).fit(module, loader())
    assert module.seen == []


@pytest.mark.parametrize(
    ("operation", "fault"),
    [("put", {"times": 2}), ("remove", {"error": PermissionError("no right to remove objects"), "times": None})],
)
def test_a_store_that_is_busy_or_removes_nothing_serves(tmp_path: Path, store: Any, operation: str, fault: Any) -> None:
    store.fail(operation, **fault)
    saver = Checkpoint("faulty://store/c", every_n_train_steps=1)
    fit(tmp_path, callbacks=saver).fit(Tiny(), loader())
    assert saver.best_model_path.endswith("step=4")
    assert operation == "remove" or not [name for name in store.objects() if "probe" in name]
