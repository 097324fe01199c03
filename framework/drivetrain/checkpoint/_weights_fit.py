"""Whether weights fit a module, by name and shape."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import CheckpointError

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class WeightMismatch:
    """What of some weights does not fit a module.

    Attributes:
        missing: names that the module has and the weights have not.
        unexpected: names that the weights have and the module has not.
        misshaped: names of both with their two shapes, in words.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    wrong_shape: Sequence[str] = ()

    @classmethod
    def compare(cls, expected: Mapping[str, Any], saved: Mapping[str, Any], partial: bool = False) -> WeightMismatch:
        """Compare by name what a module has with what there is; what has no ``shape`` is compared by name alone.

        Args:
            own: what the module has.
            saved: what there is.
            partly: it may be a part: what is not in it is not missing.
        """
        return cls(
            [] if partial else [name for name in expected if name not in saved],
            [name for name in saved if name not in expected],
            [
                f"{name} ({tuple(saved[name].shape)} instead of {tuple(value.shape)})"
                for name, value in expected.items()
                if hasattr(value, "shape")
                and hasattr(saved.get(name), "shape")
                and tuple(saved[name].shape) != tuple(value.shape)
            ],
        )

    def raise_or_warn(self, weights: str, module: str, strict: bool = True, remedy: str = "pass strict=False") -> None:
        """Refuse what does not fit, or say what is skipped. Another shape is always refused, as torch does.

        Args:
            weights: what they are called in the text: "The weights of ...".
            module: its class.
            strict: refuse missing and unexpected names; else they are skipped with a warning.
            remedy: how to take the weights with names that differ.

        Raises:
            CheckpointError: lists the names.
        """
        parts = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.wrong_shape}
        listed = ", ".join(f"{what} {_some(names)}" for what, names in parts.items() if names)
        if self.wrong_shape or (listed and strict):
            raise CheckpointError(
                f"{weights} do not fit {module}: {listed}.",
                "weights are matched by name, and a tensor is taken as a whole or not at all.",
                "build the module as it was trained"
                + ("." if self.wrong_shape else f", or {remedy} to take what fits."),
            )
        if listed:
            warnings.warn(f"{weights} do not fit {module}; skipped, with strict=False: {listed}.", stacklevel=3)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{list(names[:_SHOWN])}{more}"
