from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from callback_run import FakeRun, distributed_run

from drivetrain.callbacks import ThroughputMonitor
from drivetrain.callbacks._peak_flops import peak_of
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from worlds import on_ranks


class _Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4)


class _Tokens(_Net):
    def batch_weight(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()


def _train(
    monitor: ThroughputMonitor,
    run: FakeRun,
    module: Any,
    steps: int,
    window: int = 1,
    pause: float = 0.0,
    validate_at: int | None = None,
    weights: list[float] | None = None,
) -> None:
    trainer: Any = run
    monitor.on_train_start(trainer, module)
    for index in range(steps * window):
        batch = torch.ones(4, 8)
        run.micro_batch_weight = 4.0 if weights is None else weights[index]
        monitor.on_train_batch_start(trainer, module, batch, index)
        module.net(torch.ones(4, 8)).sum().backward()
        time.sleep(pause)
        run.samples_seen += 4 * run.strategy.control.world_size
        if (index + 1) % window == 0:
            run.global_step += 1
        monitor.on_train_batch_end(trainer, module, {}, batch, index)
        if index == validate_at:
            monitor.on_validation_start(trainer, module)
            time.sleep(0.5)
            monitor.on_validation_end(trainer, module)


def test_rates_agree_with_the_clock_and_with_each_other() -> None:
    run = FakeRun(log_every_n_steps=5)
    monitor = ThroughputMonitor()
    _train(monitor, run, _Net(), steps=20, window=2, pause=0.004, validate_at=21)
    steps = [step for step, _ in run.logged]
    assert steps == [5, 10, 15, 20]
    last = run.logged[-1][1]
    rate = last["throughput/steps_per_sec"]
    # Two sleeps of 4 ms per step are an upper bound; the half second of validation is not counted.
    assert 30 < rate < 125
    assert last["throughput/micro_batches_per_sec"] == pytest.approx(2 * rate)
    assert last["throughput/samples_per_sec"] == pytest.approx(8 * rate)
    assert "throughput/mfu" not in last
    assert "throughput/tokens_per_sec" not in last
    assert monitor.latest == last


def test_the_window_slides() -> None:
    run = FakeRun(log_every_n_steps=2)
    monitor = ThroughputMonitor(window=4)
    trainer: Any = run
    module = _Net()
    monitor.on_train_start(trainer, module)
    for index in range(24):
        monitor.on_train_batch_start(trainer, module, None, index)
        time.sleep(0.02 if index < 12 else 0.001)
        run.global_step += 1
        run.samples_seen += 1
        monitor.on_train_batch_end(trainer, module, {}, None, index)
    rates = [values["throughput/steps_per_sec"] for _, values in run.logged]
    assert rates[4] < 50  # only slow steps
    assert rates[-1] > 100  # only fast steps: the slow ones have left the window


def test_tokens_are_what_batch_weight_counts() -> None:
    run = FakeRun(log_every_n_steps=4)
    weights = [3.0 * index for index in range(1, 9)]
    monitor = ThroughputMonitor()
    _train(monitor, run, _Tokens(), steps=8, pause=0.002, weights=weights)
    last = run.logged[-1][1]
    # After the first step: 3 * (2 + ... + 8) tokens in 7 steps.
    assert last["throughput/tokens_per_sec"] / last["throughput/steps_per_sec"] == pytest.approx(3 * 35 / 7)


def _tokens_of_ranks() -> float:
    run = distributed_run(log_every_n_steps=4)
    rank = run.strategy.control.rank
    run.joining = rank == 2  # weight zero: a joining rank runs a batch of another rank
    weights = [0.0 if run.joining else 10.0 * (rank + 1)] * 8
    monitor = ThroughputMonitor()
    _train(monitor, run, _Tokens(), steps=8, pause=0.002, weights=weights)
    return monitor.latest["throughput/tokens_per_sec"] / monitor.latest["throughput/steps_per_sec"]


def test_tokens_are_counted_over_all_ranks() -> None:
    assert on_ranks(_tokens_of_ranks, 3) == [pytest.approx(30.0)] * 3


def test_the_arithmetic_is_measured_once_and_set_against_the_peak() -> None:
    run = FakeRun(log_every_n_steps=4)
    monitor = ThroughputMonitor(peak_flops=1e9)
    _train(monitor, run, _Net(), steps=8, pause=0.001)
    last = run.logged[-1][1]
    # Linear(8, 4) on 4 rows: 2*4*8*4 forward, and the weight's gradient as much again (the input has none).
    flops = 2 * 2 * 4 * 8 * 4
    assert last["throughput/tflops"] == pytest.approx(flops * last["throughput/micro_batches_per_sec"] / 1e12)
    assert last["throughput/mfu"] == pytest.approx(last["throughput/tflops"] * 1e12 / 1e9)
    given = ThroughputMonitor(peak_flops=1e9, flops=1e6)
    run = FakeRun(log_every_n_steps=4)
    _train(given, run, _Net(), steps=8, pause=0.001)
    assert given.latest["throughput/mfu"] == pytest.approx(1e6 * given.latest["throughput/steps_per_sec"] / 1e9)


def test_counting_is_switched_off_after_a_failure() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    monitor, run = ThroughputMonitor(peak_flops=1e9), FakeRun()
    trainer: Any = run
    module = _Net()
    monitor.on_train_start(trainer, module)
    for index in range(2):
        monitor.on_train_batch_start(trainer, module, None, index)
    assert len(_get_current_dispatch_mode_stack()) == 1
    monitor.on_exception(trainer, module, ValueError())
    assert _get_current_dispatch_mode_stack() == []


def test_arithmetic_that_cannot_be_seen_is_said() -> None:
    monitor, run = ThroughputMonitor(peak_flops=1e9), FakeRun()
    trainer: Any = run
    module = _Net()
    monitor.on_train_start(trainer, module)
    monitor.on_train_batch_start(trainer, module, None, 0)
    monitor.on_train_batch_end(trainer, module, {}, None, 0)
    monitor.on_train_batch_start(trainer, module, None, 1)
    with pytest.warns(UserWarning, match="counted no FLOPs"):
        monitor.on_train_batch_end(trainer, module, {}, None, 1)


def test_nothing_is_read_off_the_device_between_two_logged_steps() -> None:
    # H-01
    run = FakeRun(log_every_n_steps=1000)
    with torch.autograd.profiler.profile() as profile:
        _train(ThroughputMonitor(), run, _Tokens(), steps=20)
    syncs = sum(event.name == "aten::item" for event in profile.function_events)
    assert syncs == 1  # the sum over the ranks after the first step


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A10", torch.bfloat16, False, 125e12),
        ("NVIDIA L40S", torch.bfloat16, False, 362e12),
        ("NVIDIA L4", torch.bfloat16, False, 121e12),
        ("NVIDIA A1000 Laptop GPU", torch.bfloat16, False, None),
        ("NVIDIA H200", torch.float64, False, None),
    ],
)
def test_peaks_are_found_by_whole_names(name: str, dtype: torch.dtype, tf32: bool, peak: float | None) -> None:
    assert peak_of(name, dtype, tf32) == peak


@pytest.mark.parametrize("options", [{"window": 0}, {"peak_flops": -1.0}, {"flops": 0.0}])
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ThroughputMonitor(**options)


def test_how_float32_is_multiplied_is_known_whichever_interface_was_told() -> None:
    # The older interface raises if the newer one was used, and that used to end the run at its start.
    code = """
import torch
from drivetrain.callbacks._peak_flops import tf32_is_on
found = [tf32_is_on()]
torch.set_float32_matmul_precision("high")
found.append(tf32_is_on())
torch.set_float32_matmul_precision("highest")
found.append(tf32_is_on())
for said in ("tf32", "ieee"):
    torch.backends.cuda.matmul.fp32_precision = said
    found.append(tf32_is_on())
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[False, True, False, True, False]", done.stderr
