"""Compares weights with a module by name and shape."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import CheckpointError, listed


@dataclass(frozen=True, slots=True)
class WeightMismatch:
    """Differences between a module's tensors and the given weights.

    Attributes:
        missing: names that only the module has.
        unexpected: names that only the weights have.
        wrong_shape: names in both whose shapes differ, with the two shapes as text.
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    wrong_shape: Sequence[str] = ()

    @classmethod
    def compare(cls, expected: Mapping[str, Any], saved: Mapping[str, Any], partial: bool = False) -> WeightMismatch:
        """Compare values by name and shape. Values without a ``shape`` are compared by name only.

        Args:
            expected: the module's values, by name.
            saved: the given values, by name.
            partial: whether ``saved`` may be incomplete, so that no name counts as missing.
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
        """Raise on a mismatch, or warn about skipped names. A different shape always raises, as in torch.

        Args:
            weights: subject of the message, such as "The weights of ...".
            module: the module's class name.
            strict: raise for missing and unexpected names; otherwise warn and skip them.
            remedy: how to load only the matching weights, for the error.

        Raises:
            CheckpointError: the weights do not fit; the error lists the names.
        """
        parts = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": self.wrong_shape}
        differences = ", ".join(f"{problem} {listed(names)}" for problem, names in parts.items() if names)
        if self.wrong_shape or (differences and strict):
            raise CheckpointError(
                f"{weights} do not fit {module}: {differences}.",
                "weights are matched by name, and a tensor is never loaded in part.",
                "build the module as it was trained"
                + ("." if self.wrong_shape else f", or {remedy} to load what fits."),
            )
        if differences:
            warnings.warn(f"{weights} do not fit {module}; skipped, with strict=False: {differences}.", stacklevel=3)
