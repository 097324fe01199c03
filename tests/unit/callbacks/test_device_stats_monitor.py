"""DeviceStatsMonitor logs the statistics of the device and the host (L-08)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from callback_modules import Regression, loader, logged_rows, quiet_fit

from drivetrain import ConfigurationError
from drivetrain.callbacks import DeviceStatsMonitor
from drivetrain.loggers import CSVLogger
from emulated_cuda import requires_emulated_cuda
from worlds import on_emulated_cuda

psutil = pytest.importorskip("psutil")


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
    weights = 5 * 4
    assert start[3] >= weights
    assert end[6] >= 2 * weights  # with gradients
    assert by_moment(rows, "num_alloc_retries")[1] == {3: 0.0, 6: 0.0}
    assert not any("cpu_percent" in name for name in rows[0])


def test_where_there_is_nothing_to_log_it_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-08
    with pytest.raises(ConfigurationError, match=r"DeviceStatsMonitor\(cpu_stats=False\) has nothing to log on 'cpu'"):
        logged(tmp_path, DeviceStatsMonitor(cpu_stats=False))
    monkeypatch.setattr("drivetrain.callbacks.device_stats_monitor.is_installed", lambda name: name != "psutil")
    with pytest.raises(ConfigurationError, match="pip install psutil"):
        logged(tmp_path, DeviceStatsMonitor())


def test_without_a_logger_it_warns() -> None:  # L-08
    with pytest.warns(UserWarning, match="logs nothing: the run has no logger"):
        quiet_fit(callbacks=DeviceStatsMonitor()).fit(Regression(), loader())
