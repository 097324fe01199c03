"""How a precision's name becomes what is gathered and reduced."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from drivetrain.precision import Precision


def mixed_precision_policy(
    precision: Precision, given: MixedPrecisionPolicy | None, param_dtype: torch.dtype | None = None
) -> MixedPrecisionPolicy:
    """Return the user's policy, or one that gathers parameters as they are kept, or in the ``param_dtype`` asked for.

    Under a mixed precision autocast does the rounding, operation by operation, as it does everywhere else: what it runs
    in float32 (norms, softmax, losses, embeddings) reads float32 parameters. Gathered in half precision, those would be
    rounded once more than under any other strategy. Inputs are left alone either way: the root's are a batch, targets
    included.
    """
    if given is not None:
        return given
    return MixedPrecisionPolicy(param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)


def offload_policy(given: bool | OffloadPolicy, device: torch.device) -> OffloadPolicy:
    """Return torch's policy; memory is pinned where there is a device to copy to."""
    if isinstance(given, OffloadPolicy):
        return given
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if given else OffloadPolicy()
