"""Peak FLOP/s of GPUs, for model FLOPs utilization (MFU)."""

from __future__ import annotations

import torch

# The peak FLOP/s of each GPU without sparsity in 16 bit, TF32 and float32, from the vendors' data sheets. A device has
# the peaks of the first entry whose name matches.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("B200", (2250e12, 1100e12, 75e12)),
    ("H200", (989e12, 494e12, 67e12)),
    ("H100 PCIe", (756e12, 378e12, 51e12)),
    ("H100 NVL", (835e12, 417e12, 60e12)),
    ("H100", (989e12, 494e12, 67e12)),
    ("A100", (312e12, 156e12, 19.5e12)),
    ("A10", (125e12, 62.5e12, 31.2e12)),
    ("L40S", (362e12, 183e12, 91.6e12)),
    ("L40", (181e12, 90.5e12, 90.5e12)),
    ("L4", (121e12, 60e12, 30.3e12)),
    ("V100", (125e12, 15.7e12, 15.7e12)),
    ("T4", (65e12, 8.1e12, 8.1e12)),
    ("RTX 4090", (165e12, 82.6e12, 82.6e12)),
    ("RTX 3090", (71e12, 35.6e12, 35.6e12)),
)


def known_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of one device for matrix products in ``dtype``, or None if unknown.

    Args:
        device: the device on which the module computes.
        dtype: the dtype of matrix products; float32 means TF32 if torch is configured to use it.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype, tf32_is_on())


def tf32_is_on() -> bool:
    """Return whether CUDA multiplies float32 matrices as TF32.

    torch has two interfaces for this setting. The older interface raises an error if the setting was made through the
    newer one.
    """
    newer = [getattr(backend, "fp32_precision", "none") for backend in (torch.backends.cuda.matmul, torch.backends)]
    precision = next((value for value in newer if value != "none"), None)
    return torch.get_float32_matmul_precision() != "highest" if precision is None else bool(precision == "tf32")


def peak_of(device_name: str, dtype: torch.dtype, tf32: bool) -> float | None:
    """Return the peak FLOP/s of a device by the name that its driver reports, or None if unknown."""
    peaks = next((peaks for name, peaks in _PEAKS if _matches(device_name, name)), None)
    if peaks is None or dtype == torch.float64:
        return None
    return peaks[0] if dtype.itemsize == 2 else peaks[1] if tf32 else peaks[2]


def _matches(device_name: str, name: str) -> bool:
    # Whole words are compared, because "A100" must not match "A10".
    words, wanted = device_name.replace("-", " ").split(), name.split()
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words) - len(wanted) + 1))
