"""Converts logged values and weights to numbers, or to tensors that nothing else references."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import ConfigurationError


def number(name: str, value: Any) -> Tensor | float:
    """Return ``value`` as a number, or as a copied tensor of shape () on its device.

    Args:
        name: the key, for errors.
        value: the value passed to `log`.

    Raises:
        ConfigurationError: ``value`` is not a number.
    """
    if isinstance(value, Tensor):
        return _copy_tensor(name, value)
    numpy = sys.modules.get("numpy")  # NumPy is already imported if the value is a NumPy object
    is_numpy = numpy is not None and isinstance(value, numpy.generic | numpy.ndarray)
    if is_numpy and value.size == 1 and value.dtype.kind in "buif":  # `item` of a date may be an integer
        value = float(value.item()) if value.dtype.kind == "f" else value.item()  # that of a longdouble is no float
    if isinstance(value, int | float):
        # Subclasses (bool, IntEnum) are converted to the plain type, because checkpoints store the value.
        return int(value) if isinstance(value, int) else float(value)
    raise _value_error(
        name,
        f"a {type(value).__name__}",
        "a logged value is a number, a tensor of one element or a torchmetrics.Metric.",
        "use log_dict for several values.",
    )


def weight(name: str, batch_size: Any) -> Tensor | float:
    """Convert ``batch_size`` as `number` does. A tensor's value is not checked, since reading it waits for the device.

    Raises:
        ConfigurationError: ``batch_size`` is not a number, or is negative.
    """
    value = number(name, batch_size)
    if not isinstance(value, Tensor) and not value >= 0:
        raise ConfigurationError(
            f"log({name!r}, batch_size={batch_size!r}).",
            "batch_size is the weight of the value in a mean, which must be 0 or more.",
            "pass the number of samples that the value is a mean over, or omit batch_size.",
        )
    return value


def copy_as_tensor(value: Tensor | float) -> Tensor:
    """Return ``value`` as a new tensor of shape (), which readers may modify."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    fits_int64 = isinstance(value, int) and -(2**63) <= value < 2**63
    return torch.tensor(value, dtype=torch.int64 if fits_int64 else torch.float64)


def _copy_tensor(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1 or value.is_complex():
        raise _value_error(
            name,
            f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}",
            "a logged value is one real number.",
            "log its mean(), one element at a time, or its abs().",
        )
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = _local(name, value)
    return value.clone().reshape(())


def _local(name: str, value: Any) -> Tensor:
    """Return the local tensor of a replicated DTensor."""
    if not all(placement.is_replicate() for placement in value.placements):
        raise _value_error(
            name,
            f"a DTensor placed as {tuple(value.placements)}",
            "no rank holds the whole number, and logging does not communicate.",
            "log value.full_tensor() on every rank, or log parameters in training_step after the forward pass.",
        )
    local: Tensor = value.to_local()
    return local


def _value_error(name: str, found: str, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"log({name!r}) was given {found}.", why, fix)
