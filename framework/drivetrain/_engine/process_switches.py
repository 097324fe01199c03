"""The process-wide switches that a run flips; `ProcessState` puts them back."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("drivetrain")

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def apply_switches(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> None:
    """Switch gradients on, and what ``deterministic``, ``benchmark``, ``detect_anomaly`` ask for; None leaves it be."""
    torch.set_grad_enabled(True)  # whoever calls fit under no_grad means to train all the same
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
        if deterministic:
            # torch looks at it with the first product of matrices, and cuBLAS is not deterministic without.
            if _CUBLAS not in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                logger.warning(
                    "deterministic=%r, and this process has used CUDA without %s: once it has multiplied matrices "
                    "there, torch refuses to do so deterministically, whatever is set now. Start the process with "
                    "%s=:4096:8.",
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
