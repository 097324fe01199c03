"""Copies the next batch to a CUDA device while the step computes on the current batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain._runtime.transfer import map_tensors, move_to


class InFlight(NamedTuple):
    """A batch that is being copied, and the event that marks the end of the copy."""

    batch: Any
    arrived: torch.cuda.Event


class Prefetcher:
    """Copies batches to a CUDA device on a separate stream.

    Call `send` with the next batch, compute on the current batch, then call `receive` to get the next batch. Neither
    call blocks the host. Tensors are pinned before they are copied.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._has_unknown_objects = False

    def send(self, batch: Any) -> InFlight:
        """Start copying a batch."""
        if self._has_unknown_objects:
            # `record_stream` cannot be called for tensors in unknown objects, so this copy could reuse memory that an
            # earlier step still reads.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._copy(batch)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return InFlight(moved, arrived)

    def receive(self, sent: InFlight) -> Any:
        """Return the copied batch, after making the current stream wait for the copy."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.arrived)

        def record_use(value: Any) -> Any:
            if not isinstance(value, Tensor):
                self._has_unknown_objects = True
            elif value.is_cuda:
                # The allocator must not give the memory to a later copy while this stream still uses it.
                value.record_stream(current)
            return value

        map_tensors(sent.batch, record_use)
        return sent.batch

    def _copy(self, batch: Any) -> Any:
        return move_to(map_tensors(batch, _pin), self._device, non_blocking=True)


def _pin(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        return value if value.is_pinned() else value.pin_memory()
    return value
