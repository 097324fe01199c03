"""Copies metrics from a device for display, without making the host wait."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drivetrain._metrics.packing import Readback


class LatestNumbers:
    """Copies values to the host for display. CUDA values arrive a call late or more, so that they do not stall the run.

    `read` queues a copy of CUDA values and returns the newest copies that have completed. CPU values are
    always current.
    """

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}
        self._pending: tuple[list[str], Readback] | None = None

    def read(self, values: Mapping[str, Tensor | float], wait: bool = False) -> dict[str, float]:
        """Return the newest values that have arrived on the host.

        Args:
            values: numbers and one-element tensors by name.
            wait: whether to wait for the current values, for example at the end of an epoch.
        """
        on_device = {name for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda and not wait}
        on_host = {name: value for name, value in values.items() if name not in on_device}
        available = dict(zip(on_host, Readback(list(on_host.values())).numbers(), strict=True))
        if self._pending is not None and self._pending[1].has_arrived:
            names, readback = self._pending
            self._arrived = dict(zip(names, readback.numbers(), strict=True))
            self._pending = None
        if on_device and self._pending is None:
            names = [name for name in values if name in on_device]
            self._pending = names, Readback([values[name] for name in names])
        # Values that have not arrived yet are left out.
        shown = {name: available.get(name, self._arrived.get(name)) for name in values}
        return {name: value for name, value in shown.items() if value is not None}

    def __getstate__(self) -> dict[str, object]:
        return {"_arrived": {}, "_pending": None}  # CUDA events cannot be pickled.
