"""O-01, O-02, O-04: the engine on emulated devices."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import (
    Checkpoint,
    LearningRateMonitor,
    LossSpikeGuard,
    NonFiniteGuard,
    PredictionWriter,
    ProgressBar,
    ThroughputMonitor,
)
from drivetrain.callbacks._peak_flops import known_peak_flops
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


class LoggingFromBoth(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("auxiliary", loss.detach() if batch_idx % 2 else torch.tensor(0.0), on_epoch=True)
        return loss


def rows(batches: int = 8, device: str = "cpu", **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8 * batches, width, generator=generator).to(device) for width in (8, 1))
    return DataLoader(TensorDataset(x, y), batch_size=8, **settings)


def trained(module: Net, loader: DataLoader[Any], validation: DataLoader[Any] | None = None, **settings: Any) -> Fit:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    fit = Fit(**{"accelerator": "cuda", "devices": 1, "enable_checkpointing": False, **quiet, **settings})
    fit.fit(module, loader, validation)
    return fit


# Numbers, races, frees


def _weights(accelerator: str, precision: str, optimizer: str, devices: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = Net(optimizer)
    settings = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2, "log_every_n_steps": 1}
    trained(module, rows(), rows(3), accelerator=accelerator, devices=devices, precision=precision, **settings)
    return [value.detach().cpu() for value in module.state_dict().values()]


def _equal(gpu: EmulatedCuda, precision: str, optimizer: str, devices: Any) -> bool:
    there = _weights("cuda", precision, optimizer, devices)
    here = _weights("cpu", precision, optimizer, 1)
    return all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


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
def test_a_run_gives_the_cpus_weights_without_a_race(precision: str, optimizer: str, devices: Any) -> None:
    # O-01
    seen = on_emulated_cuda(_equal, precision, optimizer, devices)
    assert seen.returned
    assert not seen.races, seen.report
    assert not seen.frees_in_use, seen.report


@contextmanager
def _without(owner: Any, name: str) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, lambda *arguments: None)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _prefetched(gpu: EmulatedCuda, missing: str) -> None:
    module = Net("sgd")
    if missing == "nothing":
        trained(module, rows())
    elif missing == "record_stream":
        with _without(Tensor, "record_stream"):
            trained(module, rows())
    else:
        with _without(torch.cuda.Stream, "wait_event"):
            trained(module, rows())


def test_prefetched_batches_are_waited_for_and_kept_alive() -> None:
    # O-01
    seen = on_emulated_cuda(_prefetched, "nothing")
    assert not seen.races
    assert not seen.frees_in_use
    ahead = [copy for copy in seen.copies if not copy.blocking and copy.direction == "to the device"]
    assert len(ahead) == 16
    assert {copy.stream for copy in ahead}.isdisjoint({"cuda:0/default"})


def test_a_missing_record_stream_is_detected() -> None:
    # O-01
    frees = on_emulated_cuda(_prefetched, "record_stream").frees_in_use
    assert len(frees) > 5
    assert {free.use.stream for free in frees} == {"cuda:0/default"}


def test_a_missing_wait_event_is_detected() -> None:
    # O-01
    races = on_emulated_cuda(_prefetched, "wait_event").races
    assert len(races) > 15
    assert {race.earlier.name for race in races} == {"copy_"}


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


def _with_rows(gpu: EmulatedCuda) -> None:
    def collate(samples: list[Any]) -> Rows:
        return Rows(*(torch.stack(values) for values in zip(*samples, strict=True)))

    trained(OfRows("sgd"), DataLoader(rows().dataset, batch_size=8, collate_fn=collate, pin_memory=True))


def test_memory_of_opaque_batches_is_not_overwritten_while_it_is_read() -> None:
    # O-02: their tensors cannot be recorded, so copies wait for the steps
    seen = on_emulated_cuda(_with_rows)
    assert not seen.races, seen.report
    assert not seen.frees_in_use, seen.report


# Host synchronisation


def _steps(gpu: EmulatedCuda, kind: type[Net], what: str) -> dict[int, list[str]]:
    """Return host syncs and blocking copies to the host of a run with ``batches`` batches."""
    found = {}
    for batches in (8, 24):
        with tempfile.TemporaryDirectory() as folder:
            callbacks: dict[str, list[Any]] = {
                "guards": [ThroughputMonitor(), NonFiniteGuard()],
                "a guard of losses": [LossSpikeGuard()],
                "all guards": [ThroughputMonitor(), NonFiniteGuard(), LossSpikeGuard()],
                "progress": [ProgressBar()],
                "a logger": [LearningRateMonitor(logging_interval="step")],
            }
            settings: dict[str, Any] = {"callbacks": callbacks.get(what, []), "default_root_dir": folder}
            if what == "a logger":
                settings |= {"logger": "csv", "log_every_n_steps": 1}
            if what == "clipping":
                settings |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
            gpu.forget()
            trained(kind(), rows(batches, pin_memory=True), **settings)
            found[batches] = [str(sync) for sync in gpu.host_syncs]
            found[batches] += [str(copy) for copy in gpu.blocking_copies if copy.direction == "to the host"]
    return found


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "clipping",
        "guards",
        "progress",
        "a guard of losses",
        "a logger",
    ],
)
def test_the_host_waits_no_more_often_for_more_steps(what: str) -> None:
    # O-04
    found = on_emulated_cuda(_steps, Net, what).returned
    assert len(found[24]) == len(found[8]), "\n".join(found[24])


def test_the_weight_of_a_batch_is_computed_from_the_host_batch() -> None:
    # O-04
    found = on_emulated_cuda(_steps, Weighted, "all guards").returned
    assert not [text for text in found[8] if "batch_weight" in text]


def _tables(gpu: EmulatedCuda, log_every: int) -> list[str]:
    """Return what a run logs on the host and on the device."""
    written = []
    for accelerator in ("cpu", "cuda"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            logger = CSVLogger(folder)
            settings: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 5, "log_every_n_steps": log_every}
            callbacks = [LearningRateMonitor(logging_interval="step"), Checkpoint(folder, every_n_train_steps=3)]
            trained(
                Net("sgd"),
                rows(),
                rows(3),
                accelerator=accelerator,
                callbacks=callbacks,
                enable_checkpointing=True,
                logger=logger,
                **settings,
            )
            (table,) = Path(folder).rglob("metrics.csv")
            written.append(table.read_text())
    return written


@pytest.mark.parametrize("log_every", [1, 3])
def test_loggers_get_the_same_rows_in_the_same_order(log_every: int) -> None:
    # O-04
    host, device = on_emulated_cuda(_tables, log_every).returned
    assert device == host
    assert len(host.splitlines()) > 16 // log_every


class Messages(logging.Handler):
    """Records log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Spiking(Net):
    """The loss of step 13 is large, with a negligible gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (1000 if batch_idx == 13 else 0)


def _warned(gpu: EmulatedCuda) -> list[list[str]]:
    said = []
    for accelerator in ("cpu", "cuda"):
        torch.manual_seed(0)
        messages = Messages()
        logging.getLogger("drivetrain").addHandler(messages)
        trained(
            Spiking("sgd"), rows(24), accelerator=accelerator, callbacks=[LossSpikeGuard(warmup=4, every_n_steps=2)]
        )
        logging.getLogger("drivetrain").removeHandler(messages)
        said.append([text for text in messages.texts if text.startswith("LossSpikeGuard")])
    return said


def test_a_spike_is_reported_without_waiting_for_the_device() -> None:
    # O-04
    host, device = on_emulated_cuda(_warned).returned
    assert len(host) == 1
    assert "in the step after global_step=13" in host[0]
    assert device == host


def _pinned(gpu: EmulatedCuda, stage: str) -> None:
    if stage == "training":
        trained(Net(), rows(pin_memory=True), max_epochs=3)
    else:
        module = Net()
        fit = trained(module, rows(1))
        gpu.forget()
        evaluate: Any = {"validation": fit.validate, "prediction": fit.predict}[stage]
        evaluate(module, rows(pin_memory=True))


def _to_the_device(seen: Seen) -> list[Any]:
    """Return the copies of batches, without those of weights, which come from pageable memory."""
    return [copy for copy in seen.copies if copy.direction == "to the device" and copy.pinned]


def test_batches_of_pinned_memory_are_copied_while_the_host_goes_on() -> None:
    # O-01
    copies = _to_the_device(on_emulated_cuda(_pinned, "training"))
    assert len(copies) == 48
    assert not [copy for copy in copies if copy.blocking]


@pytest.mark.parametrize("stage", ["validation", "prediction"])
def test_evaluation_does_not_wait_for_copies_of_batches(stage: str) -> None:
    # O-01
    copies = _to_the_device(on_emulated_cuda(_pinned, stage))
    assert len(copies) == 16
    assert not [copy for copy in copies if copy.blocking]


def test_a_run_has_one_stream_for_copies() -> None:
    # O-01
    copies = _to_the_device(on_emulated_cuda(_pinned, "training"))
    assert len({copy.stream for copy in copies}) == 1


# Batches that are on the device already


def _resident(gpu: EmulatedCuda, kind: type[Net], precision: str) -> None:
    trained(kind("sgd"), rows(device="cuda"), precision=precision)


def test_batches_on_the_device_are_used_unchanged() -> None:
    # O-01
    seen = on_emulated_cuda(_resident, Net, "32-true")
    assert not seen.races
    assert not seen.frees_in_use


@pytest.mark.parametrize(("kind", "precision"), [(Net, "bf16-true"), (Augmented, "32-true")])
def test_operations_on_device_batches_wait_for_them(kind: type[Net], precision: str) -> None:
    # O-01
    seen = on_emulated_cuda(_resident, kind, precision)
    assert not seen.races
    assert not seen.frees_in_use


# The current device and checkpoints


def _on_device_1(gpu: EmulatedCuda) -> list[Any]:
    module = Net()
    trained(module, rows(), devices=[1])
    return [*module.devices, torch.cuda.current_device()]


def test_the_runs_device_becomes_current_and_is_restored() -> None:
    # O-01
    assert on_emulated_cuda(_on_device_1).returned == [1, 0]


def _saved(gpu: EmulatedCuda, device: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        module = Net("sgd")
        checkpoint = Checkpoint(folder, save_async=True, every_n_train_steps=8)
        trained(module, rows(), devices=[device], callbacks=[checkpoint], enable_checkpointing=True)
        (path,) = [path for path in Path(folder).iterdir() if path.is_dir()]
        weights = load(path).weights()
        return all(torch.equal(weights[name], value.cpu()) for name, value in module.state_dict().items())


def test_an_asynchronous_save_writes_the_trained_weights() -> None:
    # O-01
    assert on_emulated_cuda(_saved, 0).returned


@pytest.mark.parametrize("device", [0, 1])
def test_an_asynchronous_save_waits_for_its_source_device(device: int) -> None:
    # O-01
    seen = on_emulated_cuda(_saved, device)
    saving = "checkpoint/_format/"
    copied = {copy.device for copy in seen.copies if not copy.blocking and any(saving in line for line in copy.where)}
    waited = {sync.device for sync in seen.host_syncs if any(saving in line for line in sync.where)}
    assert copied == {device}
    assert waited == copied


# Other features


def _offloaded(gpu: EmulatedCuda) -> Tensor | None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    precision = MixedPrecision("16-mixed", "cuda")
    precision.backward((weight.cuda() * 2).sum())
    precision.unscale(optimizer)
    return weight.grad


def test_gradients_on_the_host_are_unscaled_by_the_scale() -> None:
    # O-01
    assert torch.equal(on_emulated_cuda(_offloaded).returned, torch.full((4,), 2.0))


def _logged_from_both(gpu: EmulatedCuda) -> float:
    return float(trained(LoggingFromBoth(), rows()).callback_metrics["auxiliary"])


def test_a_key_can_be_logged_from_the_host_and_from_the_device() -> None:
    # O-01
    assert on_emulated_cuda(_logged_from_both).returned > 0


def _peak(gpu: EmulatedCuda) -> None:
    kept = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        known_peak_flops(torch.device("cuda"), torch.bfloat16)
    finally:
        torch.backends.cuda.matmul.fp32_precision = kept


def test_peak_flops_are_known_for_every_way_to_enable_tf32() -> None:
    # O-01
    on_emulated_cuda(_peak)


def _written(gpu: EmulatedCuda, folder: str) -> Tensor:
    for device, path in (("cuda", "out"), ("cpu", "reference")):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = Net()
        fit = Fit(
            accelerator=device,
            devices=1,
            logger=False,
            enable_progress_bar=False,
            callbacks=[PredictionWriter(f"{folder}/{path}", part_bytes=16)],
        )
        fit.predict(module, rows(pin_memory=device == "cuda"), return_predictions=False)
    one, other = (default_collate(list(read_predictions(f"{folder}/{path}"))) for path in ("out", "reference"))
    return torch.stack([one, other])


def test_predictions_are_written_from_the_device(tmp_path: Path) -> None:  # L-03
    seen = on_emulated_cuda(_written, str(tmp_path))
    one, other = seen.returned
    assert one.device.type == "cpu"
    assert torch.equal(one, other)
    assert not seen.races, seen.report
    assert not seen.frees_in_use, seen.report
