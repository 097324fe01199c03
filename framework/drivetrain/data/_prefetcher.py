"""Copying the next batch to a CUDA device while the current one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain._runtime.transfer import map_tensors, move_to


class InFlight(NamedTuple):
    """A batch under way, and the event that marks its arrival."""

    batch: Any
    arrived: torch.cuda.Event


class Prefetcher:
    """Sends batches to a CUDA device on a stream of its own.

    `send` the next batch, compute on the current one, then `receive` the next: the host waits for neither.

    Tensors are pinned and copied; nothing else is done on that stream, which waits for nobody.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._opaque = False

        self.send: Callable[[Any], InFlight] = self._send
        """Starts the copy of a batch."""
        self.receive: Callable[[InFlight], Any] = self._receive
        """Returns the batch; what the current stream does from here on waits for its arrival."""

    def wrap(self, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put something around `send` and `receive`."""
        self.send, self.receive = around(self.send), around(self.receive)

    def _send(self, batch: Any) -> InFlight:
        if self._opaque:
            # The memory of objects we cannot look into comes back for this copy while an earlier step may read it.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            moved = self._copy(batch)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return InFlight(moved, arrived)

    def _receive(self, sent: InFlight) -> Any:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.arrived)

        def used(value: Any) -> Any:
            if not isinstance(value, Tensor):
                self._opaque = True
            elif value.is_cuda:
                # The allocator must not give the memory to a later copy before this stream is through with it.
                value.record_stream(current)
            return value

        map_tensors(sent.batch, used)
        return sent.batch

    def _copy(self, batch: Any) -> Any:
        return move_to(map_tensors(batch, _pinned), self._device, non_blocking=True)


def _pinned(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        return value if value.is_pinned() else value.pin_memory()
    return value
