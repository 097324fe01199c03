"""Which devices a run computes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drivetrain.errors import ConfigurationError, nearest

logger = logging.getLogger("drivetrain")

_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one node.

    Attributes:
        type: "cpu", "cuda" or "mps".
        indices: one for each process of the node.
        chosen: somebody asked for this many; False where "auto" took what there is.
    """

    type: str
    indices: tuple[int, ...]
    chosen: bool

    def of(self, local_rank: int) -> torch.device:
        """Return the device of the process ``local_rank`` of this node."""
        if self.type == "cpu":
            return torch.device("cpu")
        if self.type == "mps":
            return torch.device("mps", 0)
        if local_rank < len(self.indices):
            return torch.device(self.type, self.indices[local_rank])
        if torch.cuda.device_count() == 1:
            return torch.device(self.type, 0)  # a scheduler that shows each process its own device only
        raise ConfigurationError(
            f"Process {local_rank} of this node has no device of its own among {list(self.indices)}.",
            "two processes on one device would compete for it.",
            f"start {len(self.indices)} process(es) on this node.",
        )


def resolve_devices(accelerator: str, devices: int | str | Sequence[int]) -> Devices:
    """Find the devices that ``Fit(accelerator=..., devices=...)`` names.

    Raises:
        ConfigurationError: no such accelerator or device here.
    """
    kind = _kind(accelerator)
    available = {"cuda": torch.cuda.device_count(), "mps": 1}.get(kind)
    asked = _asked(devices)
    if asked == "auto" or asked == -1:
        if asked == -1 and available is None:
            raise ConfigurationError(
                "devices=-1 on the CPU.",
                "-1 stands for all devices, and CPU processes are not counted.",
                "give the number of processes, devices=2.",
            )
        return Devices(kind, tuple(range(available or 1)), chosen=asked == -1)
    assert not isinstance(asked, str)
    indices = tuple(range(asked)) if isinstance(asked, int) else tuple(asked)
    if kind == "cpu" and not isinstance(asked, int):
        raise ConfigurationError(
            f"devices={devices!r} on the CPU.",
            "CPU processes have no index.",
            f"give their number, devices={len(indices)}.",
        )
    missing = [index for index in indices if available is not None and not 0 <= index < available]
    if missing or not indices or len(set(indices)) != len(indices):
        raise ConfigurationError(
            f"devices={devices!r} with accelerator={accelerator!r}.",
            f"{kind} has {available} device(s) here, and each process needs one of its own.",
            f"ask for at most {available}, or use accelerator='cpu'.",
        )
    return Devices(kind, indices, chosen=True)


def check_devices(accelerator: object, devices: object) -> None:
    """Refuse what is no way of naming devices, without asking the hardware.

    Raises:
        ConfigurationError: names the value.
    """
    if accelerator not in ACCELERATORS:
        raise ConfigurationError(
            f"accelerator={accelerator!r} is unknown.{nearest(str(accelerator), ACCELERATORS)}",
            "it names the kind of device to compute on.",
            f"use one of {', '.join(ACCELERATORS)}.",
        )
    _asked(devices)


def cuda_is_available() -> bool:
    """Return whether there is a CUDA device, without beginning to use it where the driver's NVML can be asked.

    A process that is forked from one that uses CUDA cannot: in a notebook ranks are.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html (``PYTORCH_NVML_BASED_CUDA_CHECK``).
    """
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[_ASK_NVML]
        else:
            os.environ[_ASK_NVML] = before


def _kind(accelerator: str) -> str:
    cuda, mps = cuda_is_available(), torch.backends.mps.is_available()
    if accelerator == "auto":
        if not cuda and not mps and torch.xpu.is_available():
            logger.warning("torch sees an XPU here, which drivetrain does not drive: the run computes on the CPU.")
        return "cuda" if cuda else "mps" if mps else "cpu"
    kind = "cuda" if accelerator == "gpu" else accelerator
    if accelerator == "gpu" and not cuda and mps:
        return "mps"
    if (kind == "cuda" and not cuda) or (kind == "mps" and not mps):
        raise ConfigurationError(
            f"accelerator={accelerator!r}, and torch sees no such device.",
            "what was asked for is what runs: there is no silent substitute.",
            "use accelerator='cpu', or install a build of torch and a driver that see the device.",
        )
    return kind


def _asked(devices: object) -> int | str | Sequence[int]:
    wrong = ConfigurationError(
        f"devices={devices!r} names no devices.",
        "it is a count, a list of indices, 'auto' or -1 for all.",
        "use devices=2, devices=[0, 1], devices='0,1', devices='auto' or devices=-1.",
    )
    if isinstance(devices, str):
        text = devices.strip()
        if text == "auto":
            return text
        try:
            numbers = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise wrong from None
        devices = numbers if "," in text else numbers[0] if numbers else 0
    if type(devices) is int and (devices > 0 or devices == -1):
        return devices
    if isinstance(devices, list | tuple) and devices and all(type(index) is int for index in devices):
        return devices
    raise wrong
