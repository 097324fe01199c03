"""Which weights a checkpoint that holds trained ones alone was trained on, told by checksums of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from drivetrain._distributed.checksum import checksum_share, stack_on_cpu
from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import CheckpointError, listed

_ROUNDED = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


def base_sums(values: Mapping[str, Any], control: ControlPlane, precision: str = "") -> dict[str, str]:
    """Return a checksum of each tensor's values, the same however it is spread over the ranks. Collective.

    Values in half precision count as float32, so that a base in bfloat16 is the same one where it is held in float32.

    Args:
        values: by name: whole tensors, alike on every rank, or what this rank holds of them.
        control: the way to the other ranks.
        precision: that a checkpoint's base was trained in, whose rounding these get too; "" for none.
    """
    half = _ROUNDED.get(precision)
    mine = stack_on_cpu([checksum_share(_wide(value, half), control.rank) for value in values.values()])
    sums = control.all_gather(mine).sum(0).tolist()
    return {name: f"{one % 2**64:016x}" for name, one in zip(values, sums, strict=True)}


def check_base(path: str, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuse a checkpoint of trained weights that were trained on others than these.

    Args:
        path: the checkpoint's.
        saved: the sums of its base.
        own: those of the same names here; names that are not here are left out.

    Raises:
        CheckpointError: names what is missing or has other values.
    """
    missing = [name for name in saved if name not in own]
    other = [name for name in saved if name in own and own[name] != saved[name]]
    if not missing and not other:
        return
    parts = {"has other values here": other, "is not here": missing}
    raise CheckpointError(
        f"{path!r} was trained on another base: "
        + "; ".join(f"{listed(names)} {what}" for what, names in parts.items() if names)
        + ".",
        "it holds what was trained (trainable_only=True), and of the rest checksums alone.",
        "build the module on the weights that it was trained on.",
    )


def _wide(value: Any, half: torch.dtype | None) -> Any:
    if isinstance(value, ParameterShard):
        return replace(value, local=_wide(value.local, half), gather=None)
    value = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
    if half is not None and value.is_floating_point():
        value = value.to(half)
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
