"""ThroughputMonitor: rates by a clock that stands still but for the module's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Clock, Regression, Timed, failing, loader, logged_rows, quiet_fit
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from drivetrain import ConfigurationError
from drivetrain.callbacks import NonFiniteGuard, ReplicaCheck, ThroughputMonitor

# Private because a device's peak has no public name.
from drivetrain.callbacks._peak_flops import peak_of, tf32_is_on
from drivetrain.loggers import CSVLogger
from drivetrain.testing import run_distributed
from worlds import on_ranks

FLOPS = 2 * 2 * 4 * 4  # Linear(4, 1) on 4 rows, forward and the weight's gradient


class Tokens(Timed):
    def batch_weight(self, batch: Any) -> torch.Tensor:
        return batch[1].new_tensor(10 * len(batch[0]))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "drivetrain.callbacks.throughput_monitor.time")


@pytest.mark.parametrize(
    ("options", "module", "more"),
    [
        pytest.param({}, Timed, {}, id="rates"),
        pytest.param({}, Tokens, {"tokens_per_sec": 40}, id="tokens"),
        pytest.param({"peak_flops": 1e3}, Timed, {"tflops": FLOPS / 1e12, "mfu": FLOPS / 1e3}, id="counted FLOPs"),
        pytest.param({"peak_flops": 1e9, "flops": 1e6}, Timed, {"tflops": 1e-6, "mfu": 1e-3}, id="given FLOPs"),
    ],
)
def test_rates_are_logged(
    options: dict[str, Any], module: Any, more: dict[str, float], clock: Clock, tmp_path: Path
) -> None:
    logger, monitor = CSVLogger(tmp_path), ThroughputMonitor(**options)
    fit = quiet_fit(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=5, callbacks=monitor)
    fit.fit(module(clock), loader(80), loader(8))  # the time of the validation does not count
    rows = [row for row in logged_rows(logger) if row["throughput/steps_per_sec"]]
    assert [row["step"] for row in rows] == ["5", "10", "15", "20"]
    expected = {"samples_per_sec": 4.0, "steps_per_sec": 0.5, "micro_batches_per_sec": 1.0, **more}
    assert monitor.latest == pytest.approx({f"throughput/{name}": value for name, value in expected.items()})
    assert {name: float(rows[-1][name]) for name in monitor.latest} == pytest.approx(monitor.latest)


def test_the_window_slides(clock: Clock, tmp_path: Path) -> None:
    class Faster(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.clock.now += 9 if batch_idx < 12 else 0
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    monitor = ThroughputMonitor(window=4)
    quiet_fit(logger=logger, log_every_n_steps=2, callbacks=monitor).fit(Faster(clock), loader(24, 1))
    rates = [float(row["throughput/steps_per_sec"]) for row in logged_rows(logger) if row["throughput/steps_per_sec"]]
    slow, mixed, fast = 4 / 40, 4 / 22, 4 / 4
    assert rates[4:] == pytest.approx([slow, slow, mixed, *[fast] * 5])


def _uneven() -> tuple[int, float]:
    class Joining(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trainer.joining else loss

    monitor = ThroughputMonitor()
    callbacks = [monitor, NonFiniteGuard(every_n_steps=1), ReplicaCheck()]
    fit = quiet_fit(strategy="ddp", devices=2, max_epochs=3, log_every_n_steps=1, callbacks=callbacks)
    fit.fit(Joining(Clock()), loader(17, batch_size=2))
    return fit.samples_seen, monitor.latest["throughput/tokens_per_sec"] / monitor.latest["throughput/samples_per_sec"]


def test_a_joining_rank_is_neither_counted_nor_suspected() -> None:
    # B-04: 17 samples as 4 + 4 + 4 + 4 + 1; rank 1 joins the last step with a NaN loss of weight zero.
    assert on_ranks(_uneven, 2, process_group=None) == [(51, pytest.approx(10))] * 2


def test_counting_is_switched_off_after_a_failure() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        quiet_fit(callbacks=[ThroughputMonitor(peak_flops=1e9), failing(1)]).fit(Regression(), loader())
    assert not is_in_torch_dispatch_mode()


def test_uncounted_flops_are_warned_of() -> None:
    class Plain(Regression):
        def loss(self, batch: Any) -> torch.Tensor:
            return self.net.weight.sum()

    with pytest.warns(UserWarning, match="counted no FLOPs"):
        quiet_fit(callbacks=ThroughputMonitor(peak_flops=1e9)).fit(Plain(), loader())


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


def _tf32() -> list[bool]:
    found = [tf32_is_on()]
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        found.append(tf32_is_on())
    for precision in ("tf32", "ieee"):
        torch.backends.cuda.matmul.fp32_precision = precision
        found.append(tf32_is_on())
    return found


def test_tf32_is_known_whichever_interface_has_set_it() -> None:
    # The older interface raises if the newer one was used, and that used to end the run at its start.
    assert run_distributed(_tf32, 1, process_group=None) == [[False, True, False, True, False]]


@pytest.mark.parametrize("options", [{"window": 0}, {"peak_flops": -1.0}, {"flops": 0.0}])
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ThroughputMonitor(**options)
