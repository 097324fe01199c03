"""Precision plugins: the dtypes of a run, autocast, loss scaling and gradient clipping."""

from drivetrain.precision._loss_scaler import LOSS_SCALE_FLOOR
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import FullPrecision, Precision
from drivetrain.precision.resolve import resolve_precision
from drivetrain.precision.single_dtype import DefaultDtype, DoublePrecision, HalfPrecision

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
