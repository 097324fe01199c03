"""Copies metrics from a device for display, without making the host wait."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drivetrain._metrics.packing import Readback


class NamedNumbers:
    """Starts to copy values to the host for display.

    Args:
        values: numbers and one-element tensors by name.
    """

    def __init__(self, values: Mapping[str, Tensor | float]) -> None:
        self._names = list(values)
        self._readback = Readback(list(values.values()))

    @property
    def has_arrived(self) -> bool:
        """Whether `numbers` would return without waiting for a device."""
        return self._readback.has_arrived

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name, after waiting for those that have not arrived."""
        return dict(zip(self._names, self._readback.numbers(), strict=True))
