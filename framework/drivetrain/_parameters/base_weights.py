"""Checksums of the base weights that a checkpoint with ``trainable_only=True`` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from drivetrain._distributed.checksum import checksum_share, stack_on_cpu
from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import CheckpointError, listed

_ROUNDING_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def base_checksums(values: Mapping[str, Any], control: ControlPlane, precision: str = "") -> dict[str, str]:
    """Return a checksum of each tensor's values, independent of how it is sharded. Collective.

    Half-precision values are converted to float32 first, so that weights in bfloat16 and their copies in float32 have
    the same checksums.

    Args:
        values: unsharded tensors that are equal on every rank, or this rank's shards, by name.
        control: the control plane.
        precision: the precision that the checkpoint was trained in, to which values are rounded first; "" for no
            rounding.
    """
    rounding_dtype = _ROUNDING_DTYPES.get(precision)
    local_sums = stack_on_cpu(
        [checksum_share(_to_float32(value, rounding_dtype), control.rank) for value in values.values()]
    )
    sums = control.all_gather(local_sums).sum(0).tolist()
    return {name: f"{checksum % 2**64:016x}" for name, checksum in zip(values, sums, strict=True)}


def check_base(path: str, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise if a checkpoint's base weights differ from the current ones.

    Args:
        path: the checkpoint's path, for the error.
        saved: checksums of the checkpoint's base, by name.
        current: checksums of the current weights, by name.

    Raises:
        CheckpointError: weights are missing or have other values; the error lists them.
    """
    missing = [name for name in saved if name not in current]
    different = [name for name in saved if name in current and current[name] != saved[name]]
    if not missing and not different:
        return
    parts = {"has other values here": different, "is missing here": missing}
    raise CheckpointError(
        f"{path!r} was trained on another base: "
        + "; ".join(f"{listed(names)} {problem}" for problem, names in parts.items() if names)
        + ".",
        "the checkpoint holds only the trained parameters (trainable_only=True), and checksums of all other weights.",
        "build the module with the base weights that the checkpoint was trained on.",
    )


def _to_float32(value: Any, rounding_dtype: torch.dtype | None) -> Any:
    if isinstance(value, ParameterShard):
        return replace(value, local=_to_float32(value.local, rounding_dtype), gather=None)
    value = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    if rounding_dtype is not None and value.is_floating_point():
        value = value.to(rounding_dtype)
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
