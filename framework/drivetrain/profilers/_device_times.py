"""DeviceTimes: measure phases on a CUDA device by events, without synchronising."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from drivetrain.profilers._phase import Phase

_MAX_PENDING = 256  # pairs of events; with more pending pairs, the completed pairs are read


class DeviceTimes:
    """Reads the time between two events, one recorded when a phase begins and one when it ends.

    This is the time of the phase's device work, including that of its children, and of gaps in which the device waited
    for the host.

    Args:
        device: the CUDA device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_events: list[torch.cuda.Event] = []
        self._pending: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def record_event(self) -> torch.cuda.Event:
        """Return an event that the device reaches after the work that was launched so far."""
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end(self, phase: Phase, start_event: torch.cuda.Event) -> None:
        """Record the event for the end of a phase that began at ``start_event``."""
        self._pending.append((phase, start_event, self.record_event()))
        if len(self._pending) > _MAX_PENDING:
            self.read()

    def read(self, wait: bool = False) -> None:
        """Add the times of completed events to their phases. If ``wait`` is True, wait for all events."""
        pending = self._pending
        if wait and pending:
            torch.cuda.synchronize(self._device)
        while pending and (wait or pending[0][2].query()):  # type: ignore[no-untyped-call]
            phase, start_event, end_event = pending.popleft()
            phase.device_ns = (phase.device_ns or 0) + round(start_event.elapsed_time(end_event) * 1e6)
            self._free_events += [start_event, end_event]
