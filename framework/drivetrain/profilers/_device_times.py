"""DeviceTimes: measure phases on a CUDA device by events, without synchronising."""

from __future__ import annotations

from collections import deque

import torch

from drivetrain.profilers._phase_times import Phase

_MAX_PENDING = 256  # pairs of events; with more pending pairs, the completed pairs are read


class DeviceTimes:
    """Records an event when a phase begins and another when it ends, and reads their times once both are complete.

    The time between the two events is the time of the phase's device work and of gaps in which the device waited for
    the host. This time includes the children of the phase.

    Args:
        device: the CUDA device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_events: list[torch.cuda.Event] = []
        self._pending: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self, phase: Phase) -> torch.cuda.Event:
        """Record the event for the beginning of a phase."""
        del phase
        return self._record_event()

    def end(self, phase: Phase, start_event: torch.cuda.Event | None) -> None:
        """Record the event for the end of a phase that began at ``start_event``."""
        if start_event is None:
            return
        self._pending.append((phase, start_event, self._record_event()))
        if len(self._pending) > _MAX_PENDING:
            self.read()

    def read(self, wait: bool = False) -> None:
        """Add the times of completed events to their phases. If ``wait`` is True, wait for all events."""
        pending = self._pending
        if wait and pending:
            torch.cuda.synchronize(self._device)
        while pending and (wait or pending[0][2].query()):  # type: ignore[no-untyped-call]
            phase, start_event, end_event = pending.popleft()
            phase.device_ns = max(phase.device_ns, 0) + round(start_event.elapsed_time(end_event) * 1e6)
            self._free_events += [start_event, end_event]

    def _record_event(self) -> torch.cuda.Event:
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
