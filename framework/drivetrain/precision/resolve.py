"""From what the user wrote to a precision for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from drivetrain._config.entry_points import Names
from drivetrain.errors import ConfigurationError
from drivetrain.precision.double import DoublePrecision
from drivetrain.precision.full import FullPrecision
from drivetrain.precision.half import HalfPrecision
from drivetrain.precision.mixed import MixedPrecision
from drivetrain.precision.precision import Precision

PrecisionName = Literal[
    "64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64", "32", "bf16", "16", 64, 32, 16
]
"""What `Fit(precision=...)` takes besides a `Precision`, for editors to complete."""

_BUILDERS: dict[str, Callable[[torch.device], Precision]] = {
    "64-true": lambda device: DoublePrecision(),
    "32-true": lambda device: FullPrecision(),
    "bf16-mixed": lambda device: MixedPrecision("bf16-mixed", device),
    "16-mixed": lambda device: MixedPrecision("16-mixed", device),
    "bf16-true": lambda device: HalfPrecision("bf16-true"),
    "16-true": lambda device: HalfPrecision("16-true"),
}
_SHORTHANDS = {"64": "64-true", "32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}

_NAMES = Names[Precision](
    "precision",
    "drivetrain.precision",
    Precision,
    {},  # what other packages register is made without the device
    words=(*_BUILDERS, *_SHORTHANDS),
    why="it names the dtypes of parameters and arithmetic",
    instead="a drivetrain.Precision",
)


def canonical_name(setting: str | int) -> str:
    """The canonical name of a precision given by name or shorthand. Makes none.

    Raises:
        ConfigurationError: for an unknown name, with the nearest known one.
    """
    name = _SHORTHANDS.get(str(setting), str(setting))
    if name not in _BUILDERS:
        # As others write them: fp16, float32, bfloat16. The nearest spelling of "fp16" would be "bf16".
        plain = name.lower().replace("bfloat", "bf").removeprefix("float").removeprefix("fp")
        _NAMES.check(setting, plain)
    return name


def resolve_precision(setting: str | int | Precision, device: torch.device) -> Precision:
    """Find the precision that ``setting`` asks for, for a run on ``device``. Touches no device.

    Args:
        setting: a name (``"bf16-mixed"``, or one that a package has registered), a shorthand (``64``, ``32``,
            ``"bf16"``, ``"16"``) or a precision.
        device: where the run computes.

    Raises:
        ConfigurationError: for an unknown name, one under which something else is registered, or a precision that
            ``device`` cannot do.
    """
    given: object = setting
    if isinstance(given, Precision):
        precision = given
    elif isinstance(given, str | int) and not isinstance(given, bool):
        name = canonical_name(given)
        precision = _BUILDERS[name](device) if name in _BUILDERS else _NAMES.make(name)
    else:
        raise ConfigurationError(
            f"precision={setting!r} is a {type(setting).__name__}.",
            fix="Give a name such as 'bf16-mixed', or an instance of drivetrain.Precision.",
        )
    precision.check_device(device)
    return precision
