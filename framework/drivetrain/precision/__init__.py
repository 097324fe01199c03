"""Precision plugins: the dtypes of a run, autocast, loss scaling and gradient clipping."""

from drivetrain.precision._default_dtype import DefaultDtype
from drivetrain.precision._loss_scaler import LOSS_SCALE_FLOOR
from drivetrain.precision.double import DoublePrecision
from drivetrain.precision.full import FullPrecision
from drivetrain.precision.half import HalfPrecision
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import Precision
from drivetrain.precision.resolve import resolve_precision

__all__ = [
    "LOSS_SCALE_FLOOR",
    "DefaultDtype",
    "DoublePrecision",
    "FullPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "resolve_precision",
]
