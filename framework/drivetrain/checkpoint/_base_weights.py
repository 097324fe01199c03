"""Checksums that identify the base weights of a checkpoint with only trained parameters (``trainable_only=True``)."""

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

    Half-precision values are widened to float32 first, so a bfloat16 base equals the same base held in float32.

    Args:
        values: tensors by name: whole ones that are equal on every rank, or this rank's shards.
        control: the control plane.
        precision: precision the checkpoint's base was trained in; values are rounded to it first. "" rounds nothing.
    """
    half = _ROUNDING_DTYPES.get(precision)
    mine = stack_on_cpu([checksum_share(_to_float32(value, half), control.rank) for value in values.values()])
    sums = control.all_gather(mine).sum(0).tolist()
    return {name: f"{checksum % 2**64:016x}" for name, checksum in zip(values, sums, strict=True)}


def check_base(path: str, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise if a checkpoint's base weights differ from the current ones.

    Args:
        path: the checkpoint's path, for the error.
        saved: checksums of the checkpoint's base, by name.
        current: checksums of the current weights, by name.

    Raises:
        CheckpointError: lists the weights that are missing or have other values.
    """
    missing = [name for name in saved if name not in current]
    other = [name for name in saved if name in current and current[name] != saved[name]]
    if not missing and not other:
        return
    parts = {"has other values here": other, "is missing here": missing}
    raise CheckpointError(
        f"{path!r} was trained on another base: "
        + "; ".join(f"{listed(names)} {problem}" for problem, names in parts.items() if names)
        + ".",
        "it holds only the trained parameters (trainable_only=True), and checksums of the others.",
        "build the module with the base weights it was trained on.",
    )


def _to_float32(value: Any, half: torch.dtype | None) -> Any:
    if isinstance(value, ParameterShard):
        return replace(value, local=_to_float32(value.local, half), gather=None)
    value = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    if half is not None and value.is_floating_point():
        value = value.to(half)
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
