"""O-05: one device. `make cuda PART=tests` runs this on a GPU, its rehearsal on an emulated one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runs import REHEARSED, Net, rows, trained, weights

from drivetrain.callbacks import Checkpoint, LambdaCallback, ThroughputMonitor
from drivetrain.callbacks.throughput_monitor import known_peak_flops  # a machine's peak has no public name
from drivetrain.checkpoint import load
from drivetrain.profilers import PyTorchProfiler, SimpleProfiler
from drivetrain.testing import requires_cuda

pytestmark = [pytest.mark.cuda, requires_cuda()]


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """Multiply float32 matrices in float32, whatever the machine's default."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(kept)


@pytest.mark.parametrize(
    ("precision", "fused", "tolerance"),
    [("32-true", False, 1e-4), ("64-true", True, 1e-9), ("bf16-mixed", False, 2e-2), ("16-mixed", True, 2e-2)],
)
def test_a_run_gives_the_weights_of_the_cpu(precision: str, fused: bool, tolerance: float) -> None:  # O-05
    found = []
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": 2}
    for accelerator in ("cuda", "cpu"):
        module = Net(fused=fused)
        trained(module, accelerator=accelerator, precision=precision, **settings)
        found.append(weights(module))
    torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)
    assert not torch.equal(found[0], weights(Net()))


def test_the_requested_device_is_used_and_the_current_one_restored() -> None:  # O-05, O-02
    last, seen = torch.cuda.device_count() - 1, []
    looks = LambdaCallback(on_train_batch_end=lambda *_: seen.append(torch.cuda.current_device()))
    trained(Net(), devices=[last], callbacks=[looks])
    assert set(seen) == {last}
    assert torch.cuda.current_device() == 0


def test_an_asynchronous_save_holds_the_state_of_its_step(tmp_path: Path) -> None:
    # O-05, O-02: large enough for the copy to be still running while the next steps write
    width = 1 << (12 if REHEARSED else 20)
    kept = []

    def keep(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            kept.append(weights(module))

    saves = Checkpoint(tmp_path, save_async=True, every_n_train_steps=4, save_top_k=-1)
    callbacks = [LambdaCallback(on_train_batch_end=keep), saves]
    trained(Net(width=width), callbacks=callbacks, enable_checkpointing=True)
    (path,) = tmp_path.glob("*step=4*/")
    saved = load(path).weights()
    names = [f"net.{name}" for name in Net(width=width).net.state_dict()]
    assert torch.equal(torch.cat([saved[name].flatten() for name in names]), kept[0])


def test_a_resumed_run_with_dropout_is_bit_for_bit_equal(tmp_path: Path) -> None:
    # O-05: the device's generator is saved
    settings: dict[str, Any] = {"deterministic": True, "seed": 3}
    whole, resumed = Net(dropout=0.3), Net(dropout=0.3)
    trained(whole, **settings)
    saves = Checkpoint(tmp_path, every_n_train_steps=4)
    trained(Net(dropout=0.3), max_steps=4, callbacks=[saves], enable_checkpointing=True, **settings)
    (path,) = [each for each in tmp_path.iterdir() if each.is_dir()]
    trained(resumed, ckpt_path=path, **settings)
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_no_step_waits_for_the_device(tmp_path: Path, profiler: str | None) -> None:
    # O-05, O-04: torch raises an error if one does
    def switch(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode({4: "error", 12: "default"}.get(batch_idx, torch.cuda.get_sync_debug_mode()))

    watching = {"callbacks": [LambdaCallback(on_train_batch_start=switch)], "default_root_dir": tmp_path}
    settings = {"gradient_clip_val": 0.5, "profiler": profiler, **watching}
    try:
        fit = trained(Net(), rows(16, pin_memory=True), **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fit.global_step == 16


def test_throughput_is_logged_and_peak_flops_are_known() -> None:  # O-05
    fit = trained(Net(), rows(16), callbacks=[ThroughputMonitor()], log_every_n_steps=4)
    assert fit.global_step == 16
    for dtype in (torch.float32, torch.bfloat16):
        peak = known_peak_flops(torch.device("cuda"), dtype)
        assert peak is None or peak > 1e12


NOTEBOOK = """
import os
from benchmarks.cuda.devices import devices
from device_runs import Net, trained

rehearsed = int(os.environ.get("REHEARSED_DEVICES", "0"))
with devices(rehearsed, bool(rehearsed)):
    trained(Net(), accelerator="gpu", devices=DEVICES, strategy="ddp", launcher="fork")
print("it has trained")
"""


def test_processes_forked_by_a_notebook_can_use_their_devices(tmp_path: Path) -> None:
    # O-05, O-03: nothing has queried the driver before the fork
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.replace("DEVICES,", f"{min(2, torch.cuda.device_count())},"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, str(script)], timeout=150, **options)
    assert "it has trained" in done.stdout, done.stderr[-3000:]


def test_a_profile_includes_the_device(tmp_path: Path) -> None:  # O-05, L-05
    simple = SimpleProfiler()
    trained(Net(), profiler=simple, default_root_dir=tmp_path)
    assert sum(row.self_ns for row in simple.rows()) == simple.total_ns
    traced = PyTorchProfiler(tmp_path / "traced", memory_snapshot=not REHEARSED)
    trained(Net(), profiler=traced)
    (trace,) = (tmp_path / "traced").glob("*.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer", "ProfilerStep#2"} <= {one["name"] for one in events}
    if not REHEARSED:  # the emulation has neither kernels nor CUDA's allocator
        assert any(one.get("cat") == "kernel" and one["dur"] > 0 for one in events)
        (snapshot,) = (tmp_path / "traced").glob("*.memory.pickle")
        assert snapshot.stat().st_size > 1000
