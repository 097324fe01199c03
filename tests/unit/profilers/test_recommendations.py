"""Recommendations: a run is constructed for each, and gets that recommendation (L-05)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from profiler_case import Net, fit, loader
from torch.utils.data import DataLoader

from drivetrain import Callback
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import ProfiledRun, PyTorchProfiler, SimpleProfiler

# Waits are long beside a step of a tenth of a millisecond: no other advice comes first.
_LONG = 0.05  # seconds; enough beside other processes


@pytest.fixture(autouse=True, scope="module")
def _everything_is_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    fit(tmp_path_factory.mktemp("first")).fit(Net(), loader())  # an optimizer's first step imports half of torch


def says(advice: list[str], what: str) -> bool:
    """Whether one of the lines does: on a busy machine another may come first."""
    return any(what in line for line in advice)


def advice_of(path: Path, module: Any, data: DataLoader[Any], val: Any = None, **options: Any) -> list[str]:
    profiler = SimpleProfiler()
    fit(path, profiler=profiler, **options).fit(module, data, val)
    advice = profiler.next_steps()
    assert advice == [line[2:] for line in profiler.summary().splitlines() if line.startswith("- ")]
    assert 1 <= len(advice) <= 3
    assert all(0 < int(line.partition("%")[0]) <= 100 for line in advice)
    return advice


def test_a_slow_data_set_is_read_ahead(tmp_path: Path) -> None:
    # L-05
    advice = advice_of(tmp_path, Net(), loader(seconds=_LONG))
    assert says(advice, "of training waited for data: read in worker processes, DataLoader(num_workers=4")


def test_workers_that_do_not_keep_up_are_named(tmp_path: Path) -> None:
    # L-05
    advice = advice_of(tmp_path, Net(), loader(seconds=_LONG, num_workers=1))
    assert says(advice, "of training waited for data: num_workers=1 does not keep up")


def test_a_slow_transfer_is_named(tmp_path: Path) -> None:
    # L-05
    class Slow(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            time.sleep(_LONG)
            return batch.to(device)

    assert says(advice_of(tmp_path, Slow(), loader()), "of training was transfer to the device")


def test_a_slow_logger_is_asked_less_often(tmp_path: Path) -> None:
    # L-05
    class Slow(CSVLogger):
        def log_metrics(self, metrics: Any, step: int) -> None:
            time.sleep(_LONG)

    advice = advice_of(tmp_path, Net(), loader(), logger=Slow(tmp_path), log_every_n_steps=1)
    assert says(advice, "of training was logging: raise log_every_n_steps (now 1)")


def test_a_slow_checkpoint_is_written_less_often(tmp_path: Path) -> None:
    # L-05
    class Slow(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            time.sleep(_LONG)

    saving = {"callbacks": [Checkpoint(tmp_path / "kept", every_n_train_steps=1)], "enable_checkpointing": True}
    advice = advice_of(tmp_path, Slow(), loader(), **saving)
    assert says(advice, "of training wrote checkpoints: save less often")


def test_long_validations_are_named(tmp_path: Path) -> None:
    # L-05
    advice = advice_of(tmp_path, Net(), loader(), loader(seconds=_LONG), val_check_interval=2)
    assert says(advice, "of training was validation: validate less often (val_check_interval")
    assert not any("data" in line.partition(":")[0] for line in advice)  # that of validation is not training's


def test_a_slow_hook_is_named_with_its_owner(tmp_path: Path) -> None:
    # L-05
    class Slow(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(_LONG)

    advice = advice_of(tmp_path, Net(), loader(), callbacks=[Slow()])
    assert says(advice, "of training was Slow.on_train_batch_end: do less work there")


def test_a_slow_optimizer_is_named(tmp_path: Path) -> None:
    # L-05
    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            time.sleep(_LONG)
            return super().step(closure)

    class Slow(Net):
        def configure_optimizers(self) -> Any:
            return SlowSGD(self.parameters(), lr=1e-4)

    assert says(advice_of(tmp_path, Slow(), loader()), "of training was the optimizer's step: use a fused optimizer")


def test_slow_steps_are_what_training_is_for(tmp_path: Path) -> None:
    # L-05
    class Slow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(_LONG)
            return super().training_step(batch, batch_idx)

    (line,) = advice_of(tmp_path, Slow(), loader(32))
    assert "of training was forward, backward and optimizer; nothing else stands out" in line
    assert "try compile=True, precision='bf16-mixed'" in line


def test_an_evaluations_data_is_that_of_its_loop(tmp_path: Path) -> None:
    # L-05
    profiler = SimpleProfiler()
    fit(tmp_path, profiler=profiler).predict(Net(), loader(seconds=_LONG))
    assert "of the predict loop waited for data" in profiler.next_steps()[0]


def test_a_run_that_is_all_set_up_is_told_to_be_longer(tmp_path: Path) -> None:
    # L-05
    class Slow(Net):
        def configure_model(self) -> None:
            time.sleep(20 * _LONG)

    assert says(advice_of(tmp_path, Slow(), loader()), "of the run was not training: the run is short for a profile")


class Deep(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.layers):
            x = x + 1
        return x


def test_many_small_operations_are_seen_in_a_trace(tmp_path: Path) -> None:
    # L-05
    class Small(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(Deep(300)(batch)).mean()

    profiler = PyTorchProfiler(export_to_chrome=False)
    fit(tmp_path, profiler=profiler).fit(Small(), loader(32))
    assert "of the time in operations was spent in operations shorter than 20 us" in profiler.summary()
    assert "use a larger batch, compile=True, or an optimizer with fused=True" in profiler.summary()

    class Large(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            weights = torch.ones(700, 700)
            return self.layer(batch).mean() + 0 * (weights @ weights @ weights).mean()

    fit(tmp_path, profiler=profiler).fit(Large(), loader(32))
    assert "of the time in operations" not in profiler.summary()


def test_a_cuda_loader_without_pinned_memory_is_told_so() -> None:
    # L-05
    def advice(pinned: bool) -> str:
        profiler = SimpleProfiler(device_times=False)
        profiler.begin(ProfiledRun("fit", device=torch.device("cuda", 0), pin_memory=pinned))
        with profiler.profile("training"), profiler.profile("transfer"):
            time.sleep(_LONG)
        profiler.end()
        return profiler.next_steps()[0]

    assert "pin_memory=True" in advice(pinned=False)
    assert "transfer less" in advice(pinned=True)
