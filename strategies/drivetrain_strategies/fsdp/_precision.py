"""Translates a precision into FSDP's mixed-precision and offload policies."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from drivetrain.precision import Precision


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return the policy for a precision: parameters are gathered in their own dtype.

    Under a mixed precision, autocast rounds per operation, as under other strategies. Operations that autocast runs in
    float32 (norms, softmax, losses, embeddings) read float32 parameters. If the parameters were gathered in half
    precision, they would be rounded once more than under other strategies. Forward inputs are never cast, because the
    root's input is a batch, which includes the targets.
    """
    return MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)


def offload_policy(cpu_offload: bool | OffloadPolicy, device: torch.device) -> OffloadPolicy:
    """Return torch's offload policy. Host memory is pinned unless the device is the CPU."""
    if isinstance(cpu_offload, OffloadPolicy):
        return cpu_offload
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload else OffloadPolicy()
