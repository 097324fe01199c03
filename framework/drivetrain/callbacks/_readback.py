"""Reading numbers off a device without making the host wait for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain._metrics.packing import to_host


class Readback:
    """Brings values to the host for showing; on CUDA they arrive one request late instead of stalling the run.

    `latest` takes the values as they are now and returns the newest that have arrived. On the CPU those are the same.
    On CUDA the copy is queued behind the work that is under way and looked at on the next call.
    """

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}
        self._on_the_way: tuple[list[str], Tensor, torch.cuda.Event] | None = None

    def latest(self, values: Mapping[str, Tensor | float], wait: bool = False) -> dict[str, float]:
        """Return the newest values on the host.

        Args:
            values: numbers and one-element tensors by name.
            wait: wait for ``values`` themselves; for the end of an epoch.
        """
        at_hand: dict[str, float] = {}
        here: dict[str, Tensor] = {}
        far: dict[str, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                at_hand[name] = float(value)
            elif value.device.type == "cuda" and not wait:
                far[name] = value
            else:
                here[name] = value
        at_hand |= zip(here, to_host(list(here.values())), strict=True)
        if self._on_the_way is not None:
            names, numbers, event = self._on_the_way
            if event.query():  # type: ignore[no-untyped-call]
                self._arrived = dict(zip(names, numbers.tolist(), strict=True))
                self._on_the_way = None
        if far and self._on_the_way is None:
            self._send(far)
        # Order and names are today's; what has not arrived yet is left out.
        shown = {name: at_hand.get(name, self._arrived.get(name)) for name in values}
        return {name: value for name, value in shown.items() if value is not None}

    def __getstate__(self) -> dict[str, object]:
        return {"_arrived": {}, "_on_the_way": None}  # events do not travel to another process

    def _send(self, far: Mapping[str, Tensor]) -> None:
        packed = torch.stack([value.detach().reshape(()).double() for value in far.values()])
        numbers = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        numbers.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(packed.device))
        self._on_the_way = (list(far), numbers, event)
