"""bf16-true and 16-true: half precision throughout."""

from __future__ import annotations

import torch

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.precision._single_dtype import SingleDtypePrecision

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


class HalfPrecision(SingleDtypePrecision):
    """Keeps parameters, gradients and computation in half precision, without float32 master weights.

    Half precision takes half the memory of float32. Updates smaller than a half-precision rounding step are lost, so
    mixed precision is the safer choice for training. The loss is not scaled.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.

    Raises:
        ConfigurationError: the name is unknown.
    """

    def __init__(self, precision: str = "bf16-true") -> None:
        if precision not in _DTYPES:
            raise ConfigurationError(
                f"HalfPrecision({precision!r}) does not exist.{nearest(str(precision), _DTYPES)}",
                fix="Use 'bf16-true' or '16-true'.",
            )
        super().__init__(precision, _DTYPES[precision])
