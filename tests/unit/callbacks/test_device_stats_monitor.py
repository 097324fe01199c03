"""DeviceStatsMonitor logs the statistics of the device and the host (L-08)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import DeviceStatsMonitor
from drivetrain.loggers import CSVLogger
from emulated_cuda import requires_emulated_cuda
from worlds import on_emulated_cuda

psutil = pytest.importorskip("psutil")


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(folder: Path, callback: DeviceStatsMonitor, **settings: Any) -> list[dict[str, str]]:
    """Return the logged rows of a run with six steps and log_every_n_steps=3."""
    logger = CSVLogger(folder)
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    options: Any = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 3, **off, **settings}
    fit = Fit(logger=logger, callbacks=[callback], accumulate_grad_batches=2, **options)
    fit.fit(Net(), DataLoader(torch.ones(24, 4), batch_size=2))  # type: ignore[arg-type]
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def by_moment(rows: list[dict[str, str]], name: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for moment in ("start", "end"):
        key = f"DeviceStatsMonitor.on_train_batch_{moment}/{name}"
        found[moment] = {int(row["step"]): float(row[key]) for row in rows if row.get(key)}
    return found


def test_on_the_cpu_it_says_what_psutil_says(tmp_path: Path) -> None:  # L-08
    rows = logged(tmp_path, DeviceStatsMonitor())
    for name in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent"):
        found = by_moment(rows, name)
        assert list(found["start"]) == list(found["end"]) == [3, 6]
        assert all(0 <= value <= 100 for values in found.values() for value in values.values())
    used = by_moment(rows, "cpu_vm_percent")["end"][6]
    assert used == pytest.approx(psutil.virtual_memory().percent, abs=25)


def _on_a_gpu(gpu: Any, folder: Path) -> list[dict[str, str]]:
    return logged(folder, DeviceStatsMonitor(), accelerator="cuda", devices=1)


@requires_emulated_cuda()
def test_on_cuda_it_says_what_the_allocator_says(tmp_path: Path) -> None:  # L-08
    seen = on_emulated_cuda(_on_a_gpu, tmp_path)
    rows = seen.returned
    found = by_moment(rows, "allocated_bytes.all.current")
    weights = 5 * 4
    assert list(found["start"]) == list(found["end"]) == [3, 6]
    assert found["start"][3] >= weights
    assert found["end"][6] >= 2 * weights  # with gradients
    assert by_moment(rows, "num_alloc_retries")["end"] == {3: 0.0, 6: 0.0}
    assert not any("cpu_percent" in name for name in rows[0])


def test_where_there_is_nothing_to_log_it_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # L-08
    with pytest.raises(ConfigurationError, match=r"DeviceStatsMonitor\(cpu_stats=False\) has nothing to log on 'cpu'"):
        logged(tmp_path, DeviceStatsMonitor(cpu_stats=False))
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name == "psutil" else pytest.fail(name),
    )
    with pytest.raises(ConfigurationError, match="pip install psutil"):
        DeviceStatsMonitor().setup(_at(torch.device("cpu")), Net(), "fit")


def _at(device: torch.device) -> Any:
    from callback_run import FakeRun, FakeStrategy

    return FakeRun(strategy=FakeStrategy(device=device))


def test_a_step_of_several_micro_batches_is_logged_once() -> None:  # L-08
    callback, module = DeviceStatsMonitor(), Net()
    run: Any = _at(torch.device("cpu"))
    run.log_every_n_steps = 2
    callback.setup(run, module, "fit")
    callback.on_train_start(run, module)
    for micro_batch in range(12):  # three in each step
        callback.on_train_batch_start(run, module, None, micro_batch)
        run.global_step += micro_batch % 3 == 2
        callback.on_train_batch_end(run, module, {}, None, micro_batch)
    moments = [(step, next(iter(values)).partition("/")[0].rpartition("_")[2]) for step, values in run.logged]
    assert moments == [(2, "start"), (2, "end"), (4, "start"), (4, "end")]


def test_a_run_without_a_logger_is_told() -> None:  # L-08
    callback = DeviceStatsMonitor()
    run: Any = _at(torch.device("cpu"))
    callback.setup(run, Net(), "fit")
    run.loggers = []
    with pytest.warns(UserWarning, match="logs nothing: the run has no logger"):
        callback.on_train_start(run, Net())
    callback.on_train_batch_start(run, Net(), None, 0)
    assert run.logged == []
