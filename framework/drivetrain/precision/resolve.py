"""Resolves ``Fit(precision=...)`` to a precision for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import FullPrecision, Precision
from drivetrain.precision.single_dtype import DoublePrecision, HalfPrecision

PrecisionName = Literal[
    "64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64", "32", "bf16", "16", 64, 32, 16
]
"""The values of ``Fit(precision=...)`` other than a `Precision`, for completion in editors."""

_BUILDERS: dict[str, Callable[[torch.device], Precision]] = {
    "64-true": lambda device: DoublePrecision(),
    "32-true": lambda device: FullPrecision(),
    "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
    "16-mixed": lambda device: MixedPrecision("16-mixed", device),
    "bf16-true": lambda device: HalfPrecision("bf16-true"),
    "16-true": lambda device: HalfPrecision("16-true"),
}
_SHORTHANDS = {"64": "64-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}

_REGISTRY = EntryPointRegistry[Precision](
    "precision",
    "drivetrain.precision",
    Precision,
    {},  # `_BUILDERS` has the built-in precisions, which are created with the device as an argument
    other_values=(*_BUILDERS, *_SHORTHANDS),
    meaning="the name selects the dtypes of parameters and arithmetic",
    alternatives="a drivetrain.Precision",
)


def canonical_name(setting: str | int) -> str:
    """Return the canonical name of a precision given by name or shorthand, without creating the precision.

    Raises:
        ConfigurationError: the name is unknown. The error suggests the closest known name.
    """
    name = _SHORTHANDS.get(str(setting), str(setting))
    if name not in _BUILDERS:
        # In fp16, float32 and bfloat16, the prefixes are shortened before the comparison. Otherwise the known name
        # closest to "fp16" would be "bf16".
        spelling = name.lower().replace("bfloat", "bf").removeprefix("float").removeprefix("fp")
        _REGISTRY.check(setting, spelling)
    return name


def resolve_precision(setting: str | int | Precision, device: torch.device) -> Precision:
    """Return the precision that ``setting`` names, for a run on ``device``, without using the device.

    Args:
        setting: a name (``"bf16-mixed"``, or one that a package has registered), a shorthand (``64``, ``32``,
            ``"bf16"``, ``"16"``) or a precision.
        device: the device of the run.

    Raises:
        ConfigurationError: the name is unknown, its entry point does not return a Precision, or ``device`` does not
            support the precision.
    """
    if isinstance(setting, Precision):
        precision = setting
    else:
        name = canonical_name(setting)
        precision = _BUILDERS[name](device) if name in _BUILDERS else _REGISTRY.make(name)
    precision.check_device(device)
    return precision
