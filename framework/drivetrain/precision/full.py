"""32-true: float32 throughout."""

from __future__ import annotations

from drivetrain.precision.precision import Precision


class FullPrecision(Precision):
    """``"32-true"``: the module runs unchanged, without autocast, loss scaling or conversion of dtypes."""

    name = "32-true"
