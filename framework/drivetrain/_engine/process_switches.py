"""Sets process-wide torch flags for a run. `ProcessState` restores them."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("drivetrain")

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def apply_switches(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> None:
    """Enable gradients, and set torch's flags from the arguments of `Fit`. None leaves a flag unchanged."""
    torch.set_grad_enabled(True)  # fit may be called under no_grad
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            # cuBLAS is only deterministic with this variable, and torch reads it at the first matrix product.
            if _CUBLAS not in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                logger.warning(
                    "deterministic=%r, and this process has used CUDA without %s. If it has multiplied matrices on a "
                    "CUDA device, torch refuses deterministic matrix products until the process ends. Start the "
                    "process with %s=:4096:8.",
                    deterministic,
                    _CUBLAS,
                    _CUBLAS,
                )
            os.environ.setdefault(_CUBLAS, ":4096:8")
            torch.backends.cudnn.benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
