"""DeviceTimes: how long a CUDA device was at what a phase gave it, by events on the stream, without waiting."""

from __future__ import annotations

from collections import deque

import torch

from drivetrain.profilers._phase_times import Phase

_MOST_WAITING = 256  # pairs of events, beyond which those that have come are read


class DeviceTimes:
    """Records an event where a phase begins and one where it ends, and reads them once the device has passed both.

    What lies between two events of one stream is what the phase gave to the device, and the device's waiting for it.
    Children are included.

    Args:
        device: the CUDA device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._waiting: deque[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self, phase: Phase) -> torch.cuda.Event:
        """Mark the beginning of a phase."""
        del phase
        return self._recorded()

    def end(self, phase: Phase, mark: torch.cuda.Event | None) -> None:
        """Mark the end of a phase that begins at ``mark``."""
        if mark is None:
            return
        self._waiting.append((phase, mark, self._recorded()))
        if len(self._waiting) > _MOST_WAITING:
            self.read()

    def read(self, wait: bool = False) -> None:
        """Add up what the device has passed; where ``wait``, wait for the rest."""
        waiting = self._waiting
        if wait and waiting:
            torch.cuda.synchronize(self._device)
        while waiting and (wait or waiting[0][2].query()):  # type: ignore[no-untyped-call]
            phase, first, last = waiting.popleft()
            phase.device_ns = max(phase.device_ns, 0) + round(first.elapsed_time(last) * 1e6)
            self._free += [first, last]

    def _recorded(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
