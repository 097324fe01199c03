"""State that cannot be saved is found before the first step. J-08."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader

from drivetrain import Callback, CheckpointError, ConfigurationError, DataModule
from drivetrain._engine import write_checks
from drivetrain.callbacks import Checkpoint
from faulty_store import FaultyStore


class Odd(Callback):
    """Its state cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


class Long(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 10**5000}


class OddExtra(Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["call"] = len


class OddData(DataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def state_dict(self) -> dict[str, Any]:
        return {"queue": collections.deque([1])}


class Buffered(Tiny):
    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("odd", make())


class Hyper(Tiny):
    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Hooked(Tiny):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vocabulary"] = frozenset("ab")


class Groups(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.parameters(), "schedule": lambda step: 0.1}], lr=0.1)


class Foreign(Tiny):
    """Its optimizer has state for a tensor that is not a parameter of the module."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.state[self.key]["sum"] = torch.zeros(1)
        return optimizer


Shape = collections.namedtuple("Shape", "width height")


@pytest.mark.parametrize(
    ("module", "callbacks", "named"),
    [
        (lambda: Buffered(lambda: torch.zeros(2, dtype=torch.complex128)), [], "odd.*complex128"),
        (lambda: Buffered(lambda: torch.eye(2).to_sparse()), [], "odd.*sparse"),
        (lambda: Buffered(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)), [], "odd.*quint8"),
        (lambda: Hyper(Shape(1, 2)), [], "hyper_parameters/shape.*Shape"),
        (lambda: Hyper("x" * 2**26), [], "manifest.json would have"),
        (Hooked, [], "module/vocabulary.*frozenset"),
        (Groups, [], "param_groups/0/schedule.*function"),
        (lambda: Foreign(torch.zeros(3)), [], r"SGD has state for a tensor of shape \(3,\)"),
        (lambda: Foreign("all"), [], "SGD has state for 'all'"),
        (Tiny, [Odd()], "callbacks/Odd/state/seen.*set"),
        (Tiny, [Long()], "callbacks/Long/state/count.*integer of 16610 bits"),
        (Tiny, [OddExtra()], "callbacks/OddExtra/extra/call.*builtin"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, module: Callable[[], Tiny], callbacks: list[Callback], named: str
) -> None:
    trained = module()
    with pytest.raises(CheckpointError, match=named):
        fit(tmp_path, callbacks=[Checkpoint(tmp_path / "c"), *callbacks]).fit(trained, loader())
    assert trained.seen == []
    assert not (tmp_path / "c").exists()


def test_the_state_of_a_data_module_is_checked_too(tmp_path: Path) -> None:
    module = Tiny()
    with pytest.raises(CheckpointError, match=r"datamodule/queue.*deque"):
        fit(tmp_path, callbacks=Checkpoint(tmp_path / "c")).fit(module, datamodule=OddData())
    assert module.seen == []


def test_without_full_checkpoints_state_is_not_checked(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=Odd()).fit(Hooked(), loader())
    weights = Checkpoint(tmp_path / "c", save_weights_only=True)
    fit(tmp_path, callbacks=[weights, Odd()]).fit(Hooked(), loader())
    assert weights.best_model_path


class NotYet(Callback):
    """Its state exists only after the run has trained."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = float(trainer.callback_metrics["loss"])


class Logging(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_hook_that_fails_only_before_training_is_accepted(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path / "c")
    fit(tmp_path, callbacks=[saver, NotYet()]).fit(Logging(), loader())
    assert saver.best_model_path


# The folder


@pytest.mark.parametrize(
    ("url", "named"), [("nobody://bucket/c", "nobody"), ("hdfs://host/c", "pyarrow|hdfs|libhdfs|JVM|Java")]
)
def test_an_unreachable_folder_is_refused(tmp_path: Path, url: str, named: str) -> None:
    module = Tiny()
    with pytest.raises((ConfigurationError, CheckpointError), match=named):
        fit(tmp_path, callbacks=Checkpoint(url)).fit(module, loader())
    assert module.seen == []


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(write_checks, "_PAUSES", (0.01, 0.01))
    return FaultyStore(tmp_path / "store").mount()


def test_a_store_that_cannot_be_written_to_is_refused(tmp_path: Path, store: FaultyStore) -> None:
    store.fail("put", error=PermissionError("no right to put objects"), times=None)
    module = Tiny()
    with pytest.raises(ConfigurationError, match=r"Checkpoint cannot write to 'faulty://store/c'.*no right to put"):
        fit(tmp_path, callbacks=Checkpoint("faulty://store/c")).fit(module, loader())
    assert module.seen == []


def test_a_busy_store_is_retried_and_the_probe_is_removed(tmp_path: Path, store: FaultyStore) -> None:
    store.fail("put", times=2)
    saver = Checkpoint("faulty://store/c")
    fit(tmp_path, callbacks=saver).fit(Tiny(), loader())
    assert saver.best_model_path
    assert not [name for name in store.objects() if "probe" in name]


def test_a_store_that_cannot_remove_objects_does_not_prevent_a_run(tmp_path: Path, store: FaultyStore) -> None:
    store.fail("remove", error=PermissionError("no right to remove objects"), times=None)
    saver = Checkpoint("faulty://store/c", every_n_train_steps=1)
    fit(tmp_path, callbacks=saver).fit(Tiny(), loader())
    assert saver.best_model_path.endswith("step=4")
