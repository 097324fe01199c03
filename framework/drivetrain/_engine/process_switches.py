"""Sets process-wide torch flags for a run. `ProcessState` restores them."""

from __future__ import annotations

import os

import torch


def apply_switches(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> None:
    """Enable gradients, and set torch's flags from the arguments of `Fit`. None leaves a flag unchanged."""
    torch.set_grad_enabled(True)  # fit may be called under no_grad
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            # cuBLAS is only deterministic with this variable. If it is set too late, torch's error names it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
