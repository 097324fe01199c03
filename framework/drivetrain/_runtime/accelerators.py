"""Resolves the accelerator and devices of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from drivetrain.errors import ConfigurationError, nearest

logger = logging.getLogger("drivetrain")

_NVML_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one node.

    Attributes:
        type: "cpu", "cuda" or "mps".
        indices: the index of one device for each process of the node.
        chosen: True if the user gave the number of devices, False if "auto" took all available devices.
    """

    type: str
    indices: tuple[int, ...]
    chosen: bool

    def of(self, local_rank: int) -> torch.device:
        """Return the device of the process with rank ``local_rank`` on this node."""
        if self.type == "cpu":
            return torch.device("cpu")
        if local_rank < len(self.indices):
            return torch.device(self.type, self.indices[local_rank])
        if torch.cuda.device_count() == 1:
            return torch.device(self.type, 0)  # the job scheduler has made only one device visible to this process
        raise ConfigurationError(
            f"Process {local_rank} of this node has no device of its own among {list(self.indices)}.",
            "two processes on one device would compete for it.",
            f"start {len(self.indices)} process(es) on this node.",
        )


def resolve_devices(accelerator: str, devices: int | str | Sequence[int]) -> Devices:
    """Return the devices for ``Fit(accelerator=..., devices=...)``.

    Raises:
        ConfigurationError: the accelerator or a device does not exist on this machine.
    """
    device_type = _kind(accelerator)
    available = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device_type)
    requested = _parse_devices(devices)
    if device_type == "cpu" and (requested == -1 or not isinstance(requested, int | str)):
        raise ConfigurationError(
            f"devices={devices!r} on the CPU.",
            "CPU processes are not counted and have no index.",
            "give the number of processes, devices=2.",
        )
    if requested == "auto" or requested == -1:
        return Devices(device_type, tuple(range(available or 1)), chosen=requested == -1)
    assert not isinstance(requested, str)
    indices = tuple(range(requested)) if isinstance(requested, int) else tuple(requested)
    missing = [index for index in indices if available is not None and not 0 <= index < available]
    if missing or not indices or len(set(indices)) != len(indices):
        raise ConfigurationError(
            f"devices={devices!r} with accelerator={accelerator!r}.",
            f"this machine has {available} {device_type} device(s), and each process needs its own device.",
            f"use at most {available}, or use accelerator='cpu'.",
        )
    return Devices(device_type, indices, chosen=True)


def check_devices(accelerator: object, devices: object) -> None:
    """Raise an error for values that cannot name devices, without querying the hardware.

    Raises:
        ConfigurationError: the value cannot name an accelerator or devices.
    """
    if accelerator not in ACCELERATORS:
        raise ConfigurationError(
            f"accelerator={accelerator!r} is unknown.{nearest(str(accelerator), ACCELERATORS)}",
            "accelerator names the type of device to compute on.",
            f"use one of {', '.join(ACCELERATORS)}.",
        )
    _parse_devices(devices)


def cuda_is_available() -> bool:
    """Return True if there is a CUDA device, without initialising CUDA if NVML can be queried.

    CUDA must not be initialised, because a notebook starts ranks by a fork, and a process that has initialised CUDA
    cannot be forked.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html (``PYTORCH_NVML_BASED_CUDA_CHECK``).
    """
    before = os.environ.get(_NVML_VARIABLE)
    os.environ[_NVML_VARIABLE] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[_NVML_VARIABLE]
        else:
            os.environ[_NVML_VARIABLE] = before


def _kind(accelerator: str) -> str:
    cuda, mps = cuda_is_available(), torch.backends.mps.is_available()
    if accelerator == "auto":
        if not cuda and not mps and torch.xpu.is_available():
            logger.warning("torch sees an XPU, which drivetrain does not support: the run uses the CPU.")
        return "cuda" if cuda else "mps" if mps else "cpu"
    kind = "cuda" if accelerator == "gpu" else accelerator
    if accelerator == "gpu" and not cuda and mps:
        return "mps"
    if (kind == "cuda" and not cuda) or (kind == "mps" and not mps):
        raise ConfigurationError(
            f"accelerator={accelerator!r}, and torch sees no such device.",
            "drivetrain does not silently use another device.",
            "use accelerator='cpu', or install a build of torch and a driver that see the device.",
        )
    return kind


def _parse_devices(devices: object) -> int | str | Sequence[int]:
    parsed = devices
    if isinstance(devices, str):
        text = devices.strip()
        if text == "auto":
            return text
        with suppress(ValueError):
            numbers = [int(part) for part in text.split(",") if part.strip()]
            parsed = numbers if "," in text else numbers[0] if numbers else 0
    if type(parsed) is int and (parsed > 0 or parsed == -1):
        return parsed
    if isinstance(parsed, list | tuple) and parsed and all(type(index) is int for index in parsed):
        return parsed
    raise ConfigurationError(
        f"devices={devices!r} does not name any devices.",
        "devices must be a count, a list of indices, 'auto', or -1 for all devices.",
        "use devices=2, devices=[0, 1], devices='0,1', devices='auto' or devices=-1.",
    )
