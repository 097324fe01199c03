"""What was read ahead of training, and the random draws that came with it: a resumed run reads it, and draws, again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain._runtime.generators import (
    capture_generators,
    generator_states,
    preserved_generators,
    restore_generators,
)
from drivetrain.data._sharding import Share

Pairs = Iterator[tuple[Any, Share]]


class ReadAhead:
    """Follows the reading of an epoch and knows where the generators stood before each batch not yet trained on.

    Batches may be read before those ahead of them are trained on: a whole window at once, or one on its way to the
    device. What a data set in this process drew for them has moved the generators on by the time of a save. To come
    back to that very place, each of these batches is read again from where the generators stood before it, and then
    they are put where they stood at the save.

    Args:
        device: whose generator counts besides the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: deque[tuple[int, Callable[[], dict[str, Any]]]] = deque()
        self._read = 0
        self._final: Any = None
        self._held: Any = None
        self._again: deque[Any] = deque()  # where they are put one after the other as reading goes on

    def follow(self, pairs: Pairs, first: int, trained: Callable[[], int] | None) -> Pairs:
        """Return ``pairs``, which are taken note of where they may be read ahead of training.

        Args:
            pairs: the epoch's batches from ``first`` on.
            first: the number of the first of them.
            trained: how many of the epoch's micro-batches were trained on; None where none is read ahead, or where
                reading draws nothing in this process.
        """
        self._before.clear()
        self._read = first
        if trained is not None:
            return self._noted(pairs, trained)
        return self._resumed(pairs) if self._again else pairs

    def state(self, trained: int) -> dict[str, Any]:
        """Return what a checkpoint keeps, ``trained`` of the epoch's micro-batches having been trained on."""
        return self.capture(trained)()

    def capture(self, trained: int) -> Callable[[], dict[str, Any]]:
        """Take note of what `state` returns now, and return what gives it later."""
        if self._again:  # a resumed run has not come to reading yet
            *resumed, last = self._again
            return lambda: {"ahead": resumed, "now": last}
        ahead = [states for number, states in self._before if trained <= number < self._read]
        known = self._final or self._held
        now = capture_generators(self.device) if known is None else lambda: known
        return lambda: {"ahead": [states() for states in ahead], "now": now()}

    @contextmanager
    def aside(self, own: Iterable[Any] = ()) -> Iterator[None]:
        """Put all generators back afterwards, ``own`` of the user's too; until then `state` tells where they stood."""
        with preserved_generators(self.device, own) as self._held:
            try:
                yield
            finally:
                self._held = None

    def end(self) -> None:
        """The run is over: what the generators do from here on is none of its business."""
        self._final = generator_states(self.device)

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave as soon as the epoch's reading begins."""
        self._again = deque([*state["ahead"], state["now"]])

    def settle(self) -> None:
        """Put the generators where they stood at the save, where nothing is to be read before that."""
        if self._again:
            restore_generators(self._again.pop(), self.device)
            self._again.clear()

    def before_reading(self, run: Callable[[], object]) -> None:
        """Call ``run`` where the run that was saved would have called it, before anything is read again."""
        if not self._again:
            run()
            return
        restore_generators(self._again[-1], self.device)
        run()
        self._again[-1] = generator_states(self.device)

    def _noted(self, pairs: Pairs, trained: Callable[[], int]) -> Pairs:
        self._go_back()
        while True:
            done = trained()
            while self._before and self._before[0][0] < done:
                self._before.popleft()
            self._before.append((self._read, capture_generators(self.device)))
            pair = next(pairs, None)
            if pair is None:
                return
            self._read += 1
            self._go_back()
            yield pair

    def _resumed(self, pairs: Pairs) -> Pairs:
        # What draws nothing in this process may be read from anywhere.
        while self._again:
            self._go_back()
        yield from pairs

    def _go_back(self) -> None:
        if self._again:
            restore_generators(self._again.popleft(), self.device)
