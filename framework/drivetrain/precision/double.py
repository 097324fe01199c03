"""64-true: float64 throughout."""

from __future__ import annotations

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.precision._single_dtype import SingleDtypePrecision


class DoublePrecision(SingleDtypePrecision):
    """``"64-true"``: parameters, batches and computation in float64."""

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64)

    def check_device(self, device: torch.device) -> None:
        """Raise an error for mps, which has no float64."""
        if device.type == "mps":
            raise ConfigurationError(
                f"precision='64-true' cannot run on {device}.",
                "Apple's GPUs have no float64.",
                "Use precision='32-true', or accelerator='cpu'.",
            )
