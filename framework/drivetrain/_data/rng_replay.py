"""Saves and restores the states of the random generators before batches that are read ahead of training."""

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


class RngReplay:
    """Records the generators' states before each batch that was read but not yet trained on.

    Batches are read ahead of training: all batches of an accumulation window at once, or the batch that is being copied
    to the device. A data set in this process may draw random numbers for them, so at the time of a save the generators
    are already past these draws. A resumed run reads these batches again. Before each of them, it restores the state
    that was recorded before the batch, and finally the state at the save.

    Args:
        device: the device whose generator is saved, in addition to the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._states_before: deque[tuple[int, Callable[[], dict[str, Any]]]] = deque()
        self._read_count = 0
        self._final_state: Any = None
        self._state_on_entry: Any = None
        self._to_replay: deque[Any] = deque()  # One state per batch to read again, then the state at the save.

    def begin_reading(self, first: int, records: bool) -> None:
        """Begin to read an epoch's batches from number ``first`` on.

        Args:
            first: the number of the first batch.
            records: whether `before_read` and `after_read` are called for each batch. They need not be if no batch is
                read ahead, or if reading draws no random numbers in this process: then only the state at the save
                matters, which is restored now.
        """
        self._states_before.clear()
        self._read_count = first
        if records:
            self._restore_next()
        else:
            self.start_epoch()

    def before_read(self, trained: int) -> None:
        """Record the state before a batch is read, after ``trained`` of the epoch's micro-batches were trained on."""
        while self._states_before and self._states_before[0][0] < trained:
            self._states_before.popleft()
        self._states_before.append((self._read_count, capture_generators(self.device)))

    def after_read(self) -> None:
        """Restore the state before the next batch, if the saved run had read that as well."""
        self._read_count += 1
        self._restore_next()

    def state(self, trained: int) -> dict[str, Any]:
        """Return the state for a checkpoint, after ``trained`` of the epoch's micro-batches were trained on."""
        return self.capture(trained)()

    def capture(self, trained: int) -> Callable[[], dict[str, Any]]:
        """Return a function that returns later what `state` would return now."""
        if self._to_replay:  # A resumed run has not started reading yet.
            *resumed, last = self._to_replay
            return lambda: {"ahead": resumed, "now": last}
        ahead = [states for number, states in self._states_before if trained <= number < self._read_count]
        frozen = self._final_state or self._state_on_entry
        current = capture_generators(self.device) if frozen is None else lambda: frozen
        return lambda: {"ahead": [states() for states in ahead], "now": current()}

    @contextmanager
    def aside(self, user_generators: Iterable[Any] = ()) -> Iterator[None]:
        """Restore all generators on exit, including the user's. Until then, `state` returns the states at entry."""
        with preserved_generators(self.device, user_generators) as self._state_on_entry:
            try:
                yield
            finally:
                self._state_on_entry = None

    def end(self) -> None:
        """Freeze the result of `state`, because later changes to the generators do not belong to the run."""
        self._final_state = generator_states(self.device)

    def resume(self, state: dict[str, Any]) -> None:
        """Load what `state` returned. The generators are restored when the epoch is read next.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the state is malformed.
        """
        self._to_replay = deque([*state["ahead"], state["now"]])
        with preserved_generators(self.device):  # a malformed state is found now, and not when it is needed
            try:
                for states in self._to_replay:
                    restore_generators(states, self.device)
            except RuntimeError as error:
                raise ValueError(f"torch rejects a generator's state: {error}") from error

    def start_epoch(self) -> None:
        """Restore the generators' state at the save without reading batches again, unless it was restored already."""
        if self._to_replay:
            restore_generators(self._to_replay.pop(), self.device)
            self._to_replay.clear()

    def call_before_replay(self, run: Callable[[], object]) -> None:
        """Call ``run`` with the generators' state at the save, before any batch is read again.

        The saved run would have called ``run`` after the save. The state after ``run`` replaces the state at the save.
        """
        if not self._to_replay:
            run()
            return
        restore_generators(self._to_replay[-1], self.device)
        run()
        self._to_replay[-1] = generator_states(self.device)

    def _restore_next(self) -> None:
        if self._to_replay:
            restore_generators(self._to_replay.popleft(), self.device)
