"""Times loops that run side by side and take turns of several steps, so that machine noise affects all alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.slopes import Slopes, refuse_different_work

Loop = Callable[[], float]
"""Trains for so many steps, reading from `Turns.data`, and returns a checksum of the weights."""


@dataclass(slots=True)
class _Seat:
    """One loop's place in the round.

    Attributes:
        its_turn: set by the loop before it.
        read: samples read so far.
        since: start of this turn, in wall-clock and processor seconds.
        found: seconds per step, one value for each turn.
    """

    its_turn: threading.Event = field(default_factory=threading.Event)
    read: int = 0
    since: tuple[float, float] | None = None
    found: Slopes = field(default_factory=Slopes)
    over: bool = False


class Turns:
    """Lets one loop run at a time, each in a thread of its own, and passes the turn on when it reads its next batch.

    Start-up, first steps and end of a loop are not timed. Every rank passes on at the same
    steps, so collectives stay in order.

    Args:
        steps: steps of a turn.
        batch: samples that a loop reads per step.
        settle: called before the clock is read, to wait for asynchronous work: `torch.cuda.synchronize`.
    """

    def __init__(self, steps: int, batch: int, settle: Callable[[], None] | None = None) -> None:
        self._steps = steps
        self._settle = settle
        self._samples = steps * batch
        self._seats: dict[str, _Seat] = {}

    def data(self, tensor: Tensor) -> Dataset[tuple[Tensor]]:
        """Return a `TensorDataset` of one tensor, whose samples make a loop wait for its turn."""
        return _Samples(self, tensor)

    def run(
        self, loops: Mapping[str, Loop], compare: Callable[[int, Mapping[str, float]], None] | None = None
    ) -> dict[str, Slopes]:
        """Run all loops; returns the cost of a step of each.

        Args:
            loops: by name.
            compare: used instead of `refuse_different_work` if weights cannot be equal to the last bit.

        Raises:
            SystemExit: the weights differ, so that the loops did different work.
        """
        self._seats = {name: _Seat() for name in loops}
        sums: dict[str, float] = {}
        errors: list[BaseException] = []

        def run(name: str) -> None:
            seat = self._seats[name]
            seat.its_turn.wait()
            seat.its_turn.clear()
            try:
                sums[name] = loops[name]()
            except BaseException as error:
                errors.append(error)
            seat.over = True
            self._pass_on(name)

        threads = [threading.Thread(target=run, name=name, args=(name,), daemon=True) for name in loops]
        for thread in threads:
            thread.start()
        next(iter(self._seats.values())).its_turn.set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        steps = next(iter(self._seats.values())).read * self._steps // self._samples
        (compare or refuse_different_work)(steps, sums)
        return {name: Slopes(seat.found.wall[1:], seat.found.busy[1:]) for name, seat in self._seats.items()}

    def at_a_sample(self) -> None:
        """Pass the turn on if this thread's loop has had its steps."""
        name = threading.current_thread().name
        seat = self._seats[name]
        if seat.read % self._samples == 0:
            if self._settle is not None:
                self._settle()
            if seat.since is not None:
                wall, busy = _now()
                seat.found.wall.append((wall - seat.since[0]) / self._steps)
                seat.found.busy.append((busy - seat.since[1]) / self._steps)
            self._pass_on(name)
            seat.its_turn.wait()
            seat.its_turn.clear()
            seat.since = _now()
        seat.read += 1

    def _pass_on(self, name: str) -> None:
        names = list(self._seats)
        place = names.index(name) + 1
        for other in names[place:] + names[:place]:
            if not self._seats[other].over:
                self._seats[other].its_turn.set()
                return


class _Samples(Dataset[tuple[Tensor]]):
    def __init__(self, turns: Turns, tensor: Tensor) -> None:
        self._turns = turns
        self._tensor = tensor

    def __getitem__(self, index: int) -> tuple[Tensor]:
        self._turns.at_a_sample()
        return (self._tensor[index],)

    def __len__(self) -> int:
        return len(self._tensor)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
