"""What a logged value, or its weight, is at the call: a number, or a tensor that nobody else has."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import ConfigurationError


def number(name: str, value: Any) -> Tensor | float:
    """Return the number that ``value`` is; a tensor of shape () where it is on a device, where it stays.

    Args:
        name: the key, for the error.
        value: whatever a user may take for a number.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(value, Tensor):
        return _own(name, value)
    found = _of_numpy(name, value)
    if isinstance(found, int | float):
        # Subclasses (np.float64, bool, IntEnum) go no further: what is kept here is written to checkpoints.
        return int(found) if isinstance(found, int) else float(found)
    raise _not_one(
        name,
        f"a {type(value).__name__}",
        "a logged value is a number, a tensor of one element or a torchmetrics.Metric.",
        "use log_dict for several values.",
    )


def weight(name: str, batch_size: Any) -> Tensor | float:
    """Return ``batch_size`` as `number` does; a tensor is not read.

    Raises:
        ConfigurationError: it is no number, or a negative one.
    """
    found = number(name, batch_size)
    if not isinstance(found, Tensor) and not found >= 0:
        raise ConfigurationError(
            f"log({name!r}, batch_size={batch_size!r}).",
            "it is the weight of the value in a mean, which is 0 or more.",
            "give the number of samples that the value is a mean over, or leave it out.",
        )
    return found


def for_reading(value: Tensor | float) -> Tensor:
    """Return ``value`` as a tensor of shape () of the reader's own: what readers do to it changes nothing here."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    whole = isinstance(value, int) and -(2**63) <= value < 2**63
    return torch.tensor(value, dtype=torch.int64 if whole else torch.float64)


def _own(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise _not_one(
            name,
            f"a tensor of shape {tuple(value.shape)}",
            "a logged value is one number.",
            "log its mean(), or one element at a time.",
        )
    if value.is_complex():
        raise _not_one(
            name,
            f"a tensor of {str(value.dtype).removeprefix('torch.')}",
            "a logged value is one number.",
            "log its abs(), or .real and .imag apart.",
        )
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = _local(name, value)
    return value.clone().reshape(())


def _local(name: str, value: Any) -> Tensor:
    """What this rank holds of a DTensor, where it holds the whole of it."""
    if not all(placement.is_replicate() for placement in value.placements):
        raise _not_one(
            name,
            f"a DTensor placed as {tuple(value.placements)}",
            "no rank holds the number, and logging sends nothing.",
            "log value.full_tensor(), on every rank; or a parameter within training_step, after the forward.",
        )
    local: Tensor = value.to_local()
    return local


def _of_numpy(name: str, value: Any) -> Any:
    """What Python has for NumPy's scalars and arrays of one element; anything else as it is."""
    numpy = sys.modules.get("numpy")  # whoever has such a value has imported it
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return value
    if value.size != 1:
        raise _not_one(
            name,
            f"an array of shape {tuple(value.shape)}",
            "a logged value is one number.",
            "log its mean(), or one element at a time.",
        )
    if value.dtype.kind in "buif":  # longdouble has no other form in Python
        return float(value.item()) if value.dtype.kind == "f" else value.item()
    if isinstance(value, numpy.ndarray):
        raise _not_one(name, f"an array of {value.dtype.name}", "a logged value is one number.", "convert it.")
    return value


def _not_one(name: str, found: str, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"log({name!r}) was given {found}.", why, fix)
