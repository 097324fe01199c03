"""O-01, O-02, O-04: the engine on emulated devices."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from captured_warnings import captured_warnings
from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import (
    Checkpoint,
    LearningRateMonitor,
    LossSpikeGuard,
    NonFiniteGuard,
    PredictionWriter,
    ProgressBar,
    ThroughputMonitor,
)
from drivetrain.checkpoint import load
from drivetrain.data import read_predictions
from drivetrain.loggers import CSVLogger
from drivetrain.precision import MixedPrecision
from emulated_cuda import EmulatedCuda, requires_emulated_cuda
from worlds import Seen, on_emulated_cuda

pytestmark = requires_emulated_cuda()


class Net(TrainModule):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        # Layers that autocast treats the same on the CPU and on CUDA, unlike a layer norm.
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.optimizer = optimizer
        self.devices: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert x.device == self.net[0].weight.device
        loss = nn.functional.mse_loss(self.net(x).float(), y.float())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 1e-2)
        return torch.optim.AdamW(self.parameters(), 1e-2, fused=self.optimizer == "fused")

    def on_train_start(self) -> None:
        if torch.cuda.is_initialized():
            self.devices.append(torch.cuda.current_device())


class Augmented(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 1.1, batch[1]]


class Weighted(Net):
    def batch_weight(self, batch: Any) -> float:
        return float((batch[1] > -9).sum())


class Spiking(Net):
    """Logs a key from the host and from the device; the loss of step 13 is large, with a negligible gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("auxiliary", loss.detach() if batch_idx % 2 else torch.tensor(0.0), on_epoch=True)
        return loss + (1000 if self.global_step == 13 else 0)


def rows(batches: int = 8, device: str = "cpu", **settings: Any) -> DataLoader[Any]:
    """Batches of eight, of which the last is smaller."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8 * batches - 3, width, generator=generator).to(device) for width in (8, 1))
    return DataLoader(TensorDataset(x, y), batch_size=8, **settings)


def trained(module: Net, loader: DataLoader[Any], validation: DataLoader[Any] | None = None, **settings: Any) -> Fit:
    fit = Fit(**{**QUIET, "accelerator": "cuda", "devices": 1, "max_epochs": 1, "seed": None, **settings})
    fit.fit(module, loader, validation)
    return fit


def assert_clean(seen: Seen) -> None:
    """No memory was read too early or freed too early."""
    assert not seen.races, seen.report
    assert not seen.frees_in_use, seen.report


def _equal(gpu: EmulatedCuda, precision: str, optimizer: str, devices: Any) -> bool:
    weights = []
    for accelerator, count in (("cuda", devices), ("cpu", 1)):
        torch.manual_seed(0)
        module = Net(optimizer)
        options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2, "log_every_n_steps": 1}
        trained(module, rows(), rows(3), accelerator=accelerator, devices=count, precision=precision, **options)
        weights.append([value.detach().cpu() for value in module.state_dict().values()])
    return all(torch.equal(there, here) for there, here in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("precision", "optimizer", "devices"),
    [
        ("32-true", "adamw", 1),
        ("32-true", "fused", [1]),
        ("32-true", "sgd", "0,"),
        ("bf16-mixed", "adamw", 1),
        ("bf16-true", "sgd", 1),
        ("16-mixed", "adamw", [1]),
    ],
)
def test_a_run_gives_the_cpus_weights_without_a_race(precision: str, optimizer: str, devices: Any) -> None:  # O-01
    seen = on_emulated_cuda(_equal, precision, optimizer, devices)
    assert seen.returned
    assert_clean(seen)


class Rows:
    """A batch of a user's class, whose tensors the framework cannot find."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any, non_blocking: bool = False) -> Rows:
        return Rows(self.x.to(device, non_blocking=non_blocking), self.y.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Rows:
        return Rows(self.x.pin_memory(), self.y.pin_memory())


class OfRows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch.x, batch.y), batch_idx)


def _collate(samples: list[Any]) -> Rows:
    return Rows(*(torch.stack(values) for values in zip(*samples, strict=True)))


def _fed(gpu: EmulatedCuda, kind: type[Net], precision: str) -> None:
    opaque = DataLoader(rows().dataset, batch_size=8, collate_fn=_collate, pin_memory=True)
    trained(kind("sgd"), opaque if kind is OfRows else rows(device="cuda"), precision=precision)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        # the tensors of opaque batches cannot be recorded, so copies wait for the steps
        (OfRows, "32-true"),
        *((Net, "32-true"), (Net, "bf16-true"), (Augmented, "32-true")),
    ],
)
def test_memory_of_opaque_batches_and_of_batches_on_the_device_is_safe(kind: Any, precision: str) -> None:  # O-01, O-02
    assert_clean(on_emulated_cuda(_fed, kind, precision))


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "clipping": lambda: {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "clipping by value": lambda: {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    "guards": lambda: {"callbacks": [ThroughputMonitor(), NonFiniteGuard(), LossSpikeGuard()]},
    "progress": lambda: {"callbacks": [ProgressBar()]},
    "a logger": lambda: {"logger": "csv", "log_every_n_steps": 1, "callbacks": [LearningRateMonitor("step")]},
}


def _steps(gpu: EmulatedCuda, what: str) -> dict[int, list[str]]:
    """Return host syncs and blocking copies to the host of a run with ``batches`` batches."""
    found = {}
    for batches in (8, 24):
        with tempfile.TemporaryDirectory() as folder:
            gpu.forget()
            trained(Weighted(), rows(batches, pin_memory=True), default_root_dir=folder, **RUNS[what]())
            found[batches] = [str(sync) for sync in gpu.host_syncs]
            found[batches] += [str(copy) for copy in gpu.blocking_copies if copy.direction == "to the host"]
    return found


@pytest.mark.parametrize("what", RUNS)
def test_the_host_waits_no_more_often_for_more_steps(what: str) -> None:  # O-04
    found = on_emulated_cuda(_steps, what).returned
    assert len(found[24]) == len(found[8]), "\n".join(found[24])
    assert not [text for text in found[8] if "batch_weight" in text]  # it is computed from the host batch


def _reported(gpu: EmulatedCuda, log_every: int) -> list[tuple[str, list[str]]]:
    """Return what a run logs, and of which spikes it warns, on the host and on the device."""
    reported = []
    for accelerator in ("cpu", "cuda"):
        with tempfile.TemporaryDirectory() as folder, captured_warnings() as lines:
            torch.manual_seed(0)
            settings: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 5, "log_every_n_steps": log_every}
            settings |= {"logger": CSVLogger(folder), "enable_checkpointing": True}
            guards = [LearningRateMonitor(logging_interval="step"), LossSpikeGuard(warmup=4, every_n_steps=2)]
            settings["callbacks"] = [*guards, Checkpoint(folder)]
            trained(Spiking("sgd"), rows(), rows(3), accelerator=accelerator, **settings)
            (table,) = Path(folder).rglob("metrics.csv")
            reported.append((table.read_text(), [line for line in lines if line.startswith("LossSpikeGuard")]))
    return reported


@pytest.mark.parametrize("log_every", [1, 3])
def test_logged_rows_and_reported_spikes_are_those_of_the_host_in_the_same_order(log_every: int) -> None:  # O-04
    host, device = on_emulated_cuda(_reported, log_every).returned
    assert device == host
    table, warnings = host
    assert len(table.splitlines()) > 16 // log_every
    assert "auxiliary_epoch" in table
    assert len(warnings) == 1
    assert "in the step after global_step=13" in warnings[0]


def _pinned(gpu: EmulatedCuda, stage: str) -> None:
    module = Net()
    if stage == "training":
        trained(module, rows(pin_memory=True), max_epochs=3)
        return
    fit = trained(module, rows(1))
    gpu.forget()
    evaluate: Any = {"validation": fit.validate, "prediction": fit.predict}[stage]
    evaluate(module, rows(pin_memory=True))


@pytest.mark.parametrize(("stage", "count"), [("training", 48), ("validation", 16), ("prediction", 16)])
def test_batches_of_pinned_memory_are_copied_while_the_host_goes_on(stage: str, count: int) -> None:  # O-01
    seen = on_emulated_cuda(_pinned, stage)
    assert_clean(seen)
    # Without those of weights, which come from pageable memory.
    copies = [copy for copy in seen.copies if copy.direction == "to the device" and copy.pinned]
    assert len(copies) == count
    assert not [copy for copy in copies if copy.blocking]
    (stream,) = {copy.stream for copy in copies}
    assert (stream == "cuda:0/default") == (stage != "training")


def _saved(gpu: EmulatedCuda, device: int) -> list[int]:
    """Return the device that was current in the run, and the one after it."""
    with tempfile.TemporaryDirectory() as folder:
        module = Net("sgd")
        checkpoint = Checkpoint(folder, save_async=True, every_n_train_steps=8)
        trained(module, rows(), devices=[device], callbacks=[checkpoint], enable_checkpointing=True)
        (path,) = [path for path in Path(folder).iterdir() if path.is_dir()]
        weights = load(path).weights()
        assert all(torch.equal(weights[name], value.cpu()) for name, value in module.state_dict().items())
        return [*module.devices, torch.cuda.current_device()]


@pytest.mark.parametrize("device", [0, 1])
def test_the_runs_device_is_current_and_is_waited_for_by_an_asynchronous_save(device: int) -> None:  # O-01, O-02
    seen = on_emulated_cuda(_saved, device)
    assert seen.returned == [device, 0]
    saving = "_format/"
    copied = {copy.device for copy in seen.copies if not copy.blocking and any(saving in line for line in copy.where)}
    waited = {sync.device for sync in seen.host_syncs if any(saving in line for line in sync.where)}
    assert copied == waited == {device}


def _offloaded(gpu: EmulatedCuda) -> Tensor | None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    precision = MixedPrecision("16-mixed", "cuda")
    precision.backward((weight.cuda() * 2).sum())
    precision.unscale(optimizer)
    return weight.grad


def test_gradients_on_the_host_are_unscaled_by_the_scale() -> None:  # O-01
    assert torch.equal(on_emulated_cuda(_offloaded).returned, torch.full((4,), 2.0))


class Watching(Callback):
    """Records the devices of outputs, and how many are in memory at once."""

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.alive: list[int] = []
        self.outputs: list[weakref.ref[Tensor]] = []

    def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.devices.append(outputs.device.type)
        self.outputs.append(weakref.ref(outputs))
        self.alive.append(sum(output() is not None for output in self.outputs))


def _predicted(gpu: EmulatedCuda, folder: str) -> tuple[list[str], int, list[str], list[Tensor]]:
    watching = Watching()
    outputs = Fit(accelerator="cuda", devices=1, callbacks=[watching], **QUIET).predict(Net(), rows())
    written = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        module, path = Net(), f"{folder}/{device}"
        fit = Fit(accelerator=device, devices=1, callbacks=[PredictionWriter(path, part_bytes=16)], **QUIET)
        fit.predict(module, rows(pin_memory=device == "cuda"), return_predictions=False)
        written.append(default_collate(list(read_predictions(path))))
    return watching.devices, max(watching.alive), [output.device.type for output in outputs], written


def test_predictions_leave_the_device_as_they_come_and_are_written_from_it(tmp_path: Path) -> None:  # I-14, L-03
    seen = on_emulated_cuda(_predicted, str(tmp_path))
    devices, alive, returned, (one, other) = seen.returned
    assert (devices, returned) == (["cuda"] * 8, ["cpu"] * 8)
    assert alive <= 2
    assert one.device.type == "cpu"
    assert torch.equal(one, other)
    assert_clean(seen)
