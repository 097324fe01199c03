"""32-true: float32 throughout."""

from __future__ import annotations

from drivetrain.precision.precision import Precision


class FullPrecision(Precision):
    """``"32-true"``: the module runs as it is; nothing is wrapped, scaled or converted."""

    name = "32-true"
