"""The process-wide switches that a run flips; `ProcessState` puts them back."""

from __future__ import annotations

import os

import torch


def apply_switches(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> None:
    """Switch gradients on, and what ``deterministic``, ``benchmark``, ``detect_anomaly`` ask for; None leaves it be."""
    torch.set_grad_enabled(True)  # whoever calls fit under no_grad means to train all the same
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            # cuBLAS reads it as its handle is made, and is not deterministic without.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
