"""LearningRateMonitor, ThroughputMonitor and DeviceStatsMonitor: the logged values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Clock, Regression, Timed, failing, loader, logged_rows, quiet_fit
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from drivetrain import ConfigurationError, callbacks
from drivetrain.callbacks import DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor

# Private because a device's peak has no public name.
from drivetrain.callbacks._peak_flops import peak_of, tf32_is_on
from drivetrain.loggers import CSVLogger
from drivetrain.testing import requires_package, run_distributed
from emulated_cuda import requires_emulated_cuda
from worlds import on_emulated_cuda, on_ranks

PSUTIL = requires_package("psutil")
FLOPS = 2 * 2 * 4 * 4  # Linear(4, 1) on 4 rows, forward and the weight's gradient


class Several(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        pass

    def configure_optimizers(self) -> Any:
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(4))
        first, second, third, fourth = self.more
        groups = [{"params": [second], "lr": 0.2}, {"params": [third], "lr": 0.3, "name": "head"}]
        return [AdamW([first], lr=0.1), AdamW(groups), SGD([fourth], lr=0.5, momentum=0.9, weight_decay=0.01)]


def test_every_group_of_every_optimizer_has_a_key(tmp_path: Path) -> None:
    rates = {"lr-AdamW": 0.1, "lr-AdamW-1/pg1": 0.2, "lr-AdamW-1/head": 0.3, "lr-SGD": 0.5}
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    fit = quiet_fit(logger=CSVLogger(tmp_path), callbacks=monitor)
    fit.fit(Several(), loader(4))
    more = {"lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01, "lr-AdamW-momentum": 0.9}
    assert {name: float(fit.callback_metrics[name]) for name in more} == pytest.approx(more)
    assert len(fit.callback_metrics) == 12
    assert monitor.lrs == {name: [value] for name, value in rates.items()}


class Scheduled(Regression):
    """The step after n others has the rate 1 / (n + 1)."""

    def __init__(self, interval: str | None, name: str | None = None) -> None:
        super().__init__()
        self.settings = {"interval": interval, "name": name}

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        if self.settings["interval"] is None:
            return optimizer
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.settings}}


@pytest.mark.parametrize(
    ("interval", "module", "rates"),
    [
        pytest.param(None, Scheduled("step"), {n: 1 / n for n in (2, 4, 6, 8, 10)}, id="as the scheduler, by steps"),
        pytest.param(None, Scheduled("epoch", "warmup"), {0: 1.0, 5: 0.5}, id="as the scheduler, by epochs, named"),
        pytest.param(None, Scheduled(None), {0: 1.0, 5: 1.0}, id="no scheduler"),
        pytest.param("step", Scheduled(None), dict.fromkeys((2, 4, 6, 8, 10), 1.0), id="steps, as asked"),
        pytest.param("epoch", Scheduled("step"), {0: 1.0, 5: 1 / 6}, id="epochs, as asked"),
    ],
)
def test_rates_are_in_the_rows_of_their_steps(interval: Any, module: Any, rates: Any, tmp_path: Path) -> None:  # B-09
    logger, monitor = CSVLogger(tmp_path), LearningRateMonitor(interval)
    fit = quiet_fit(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=2, callbacks=monitor)
    fit.fit(module, loader())
    name = module.settings["name"] or "lr-SGD"
    rows = [row for row in logged_rows(logger) if row[name]]
    assert {int(row["step"]): float(row[name]) for row in rows} == pytest.approx(rates)
    assert {key: len(values) for key, values in monitor.lrs.items()} == {name: len(rates)}
    assert all(row["train_loss"] for row in rows if 2 in rates)  # in the same row


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
def test_rates_are_logged(options: Any, module: Any, more: dict[str, float], clock: Clock, tmp_path: Path) -> None:
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
    watching = [monitor, callbacks.NonFiniteGuard(every_n_steps=1), callbacks.ReplicaCheck()]
    fit = quiet_fit(strategy="ddp", devices=2, max_epochs=3, log_every_n_steps=1, callbacks=watching)
    fit.fit(Joining(Clock()), loader(17, batch_size=2))
    return fit.samples_seen, monitor.latest["throughput/tokens_per_sec"] / monitor.latest["throughput/samples_per_sec"]


def test_a_joining_rank_is_neither_counted_nor_suspected() -> None:
    # B-04: 17 samples as 4 + 4 + 4 + 4 + 1; rank 1 joins the last step with a NaN loss of weight zero.
    assert on_ranks(_uneven, 2, process_group=None) == [(51, pytest.approx(10))] * 2


def test_flops_are_counted_during_a_run_alone_and_none_are_warned_of() -> None:
    class Plain(Regression):
        def loss(self, batch: Any) -> torch.Tensor:
            return self.net.weight.sum()

    with pytest.warns(UserWarning, match="counted no FLOPs"):
        quiet_fit(callbacks=ThroughputMonitor(peak_flops=1e9)).fit(Plain(), loader())
    with pytest.raises(RuntimeError, match="out of luck"):
        quiet_fit(callbacks=[ThroughputMonitor(peak_flops=1e9), failing(1)]).fit(Regression(), loader())
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, False, 756e12),
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
    # The older interface raises if the newer one was used.
    assert run_distributed(_tf32, 1, process_group=None) == [[False, True, False, True, False]]


def logged(folder: Path, callback: DeviceStatsMonitor, **options: Any) -> list[dict[str, str]]:
    """Return the logged rows of a run with six steps of two micro-batches and log_every_n_steps=3."""
    logger = CSVLogger(folder)
    settings: dict[str, Any] = {"log_every_n_steps": 3, "accumulate_grad_batches": 2, **options}
    quiet_fit(logger=logger, callbacks=callback, **settings).fit(Regression(), loader(12, 1))
    return logged_rows(logger)


def by_moment(rows: list[dict[str, str]], name: str) -> tuple[dict[int, float], dict[int, float]]:
    """Return the values at the start and at the end of steps, by step."""
    keys = [f"DeviceStatsMonitor.on_train_batch_{moment}/{name}" for moment in ("start", "end")]
    values = [[(int(row["step"]), float(row[key])) for row in rows if row.get(key)] for key in keys]
    assert [[step for step, _ in each] for each in values] == [[3, 6], [3, 6]]
    start, end = map(dict, values)
    return start, end


def test_on_the_cpu_it_logs_psutils_values(tmp_path: Path) -> None:  # L-08
    psutil = pytest.importorskip("psutil")
    rows = logged(tmp_path, DeviceStatsMonitor())
    for name in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent"):
        assert all(0 <= value <= 100 for values in by_moment(rows, name) for value in values.values())
    assert by_moment(rows, "cpu_vm_percent")[1][6] == pytest.approx(psutil.virtual_memory().percent, abs=25)


def _on_a_gpu(gpu: Any, folder: Path) -> list[dict[str, str]]:
    return logged(folder, DeviceStatsMonitor(), accelerator="cuda", devices=1)


@requires_emulated_cuda()
def test_on_cuda_it_logs_the_allocators_values(tmp_path: Path) -> None:  # L-08
    rows = on_emulated_cuda(_on_a_gpu, tmp_path).returned
    start, end = by_moment(rows, "allocated_bytes.all.current")
    assert start[3] >= 5 * 4
    assert end[6] >= 2 * 5 * 4  # with gradients
    assert by_moment(rows, "num_alloc_retries")[1] == {3: 0.0, 6: 0.0}
    assert not any("cpu_percent" in name for name in rows[0])


def test_where_there_is_nothing_to_log_it_is_refused_by_name(tmp_path: Path, monkeypatch: Any) -> None:  # L-08
    with pytest.raises(ConfigurationError, match=r"DeviceStatsMonitor\(cpu_stats=False\) has nothing to log on 'cpu'"):
        logged(tmp_path, DeviceStatsMonitor(cpu_stats=False))
    monkeypatch.setattr("drivetrain.callbacks.device_stats_monitor.is_installed", lambda name: name != "psutil")
    with pytest.raises(ConfigurationError, match="pip install psutil"):
        logged(tmp_path, DeviceStatsMonitor())


@pytest.mark.parametrize("kind", [LearningRateMonitor, pytest.param(DeviceStatsMonitor, marks=PSUTIL)])
def test_without_a_logger_monitors_warn(kind: Any) -> None:  # L-08
    with pytest.warns(UserWarning, match="logs nothing: the run has no logger"):
        quiet_fit(callbacks=kind()).fit(Regression(), loader(4))
