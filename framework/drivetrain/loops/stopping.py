"""When a run stops early, decided once for all ranks."""

from __future__ import annotations

import time
from datetime import timedelta

from drivetrain.control import ControlPlane

AGREE_EVERY = 16
"""Steps between two looks at the store."""


class StopRequest:
    """Anybody may ask to stop, on any rank; all ranks then stop after the same step.

    No collective is issued. Every `AGREE_EVERY` steps a rank publishes its step in the store and then looks for a
    request. Who requests first reads all published steps, and names the step to stop after: the furthest of them plus
    `AGREE_EVERY`. A rank that looked too early to see the request had published its step before, so the named step is
    at or after its next look.

    Args:
        control: the way to the other ranks.
        max_time: after which a stop is requested; None for never.
        min_steps: optimizer steps before which nothing stops the run.
        min_epochs: epochs before which nothing stops the run.
    """

    def __init__(
        self, control: ControlPlane, max_time: timedelta | None, min_steps: int | None, min_epochs: int | None
    ) -> None:
        self._control = control
        self._store = control.store
        self._deadline = None if max_time is None else time.monotonic() + max_time.total_seconds()
        self._min_steps = min_steps or 0
        self._min_epochs = min_epochs or 0
        self._step_to_stop_after: int | None = None
        self._asked = False
        self._agreed = False
        self.requested = False
        """Set to ask for a stop; ``trainer.should_stop``."""

    def after_step(self, step: int, epoch: int) -> bool:
        """Whether to stop now, after optimizer step ``step`` of epoch ``epoch``. Called on every rank at every step."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.requested = True
        store = self._store
        if store is None or self._agreed:
            return self.requested and self._may_stop(step, epoch)
        if self._step_to_stop_after is None:
            if self.requested and not self._asked:
                self._ask(step)
            elif step % AGREE_EVERY == 0:
                store.set(f"stop/step/{self._control.rank}", str(step))
                if store.check(["stop/asked"]):
                    self._step_to_stop_after = int(store.get("stop/after"))
        if self._step_to_stop_after is None or step < self._step_to_stop_after:
            return False
        self.requested = True
        return self._may_stop(step, epoch)

    def agree(self) -> None:
        """Learn whether any rank asks, where all ranks stand at the same point anyway."""
        (asking,) = self._control.agree("the end of a validation run", self.requested)
        self.requested = self._agreed = asking > 0

    def after_epoch(self, anybody: bool, step: int, epochs: int) -> bool:
        """Whether to stop between epochs; ``anybody`` says whether any rank requests it, as agreed by all."""
        self.requested = anybody
        return anybody and self._may_stop(step, epochs)

    def _may_stop(self, step: int, epochs: int) -> bool:
        return step >= self._min_steps and epochs >= self._min_epochs

    def _ask(self, step: int) -> None:
        store = self._store
        assert store is not None
        self._asked = True
        if store.add("stop/asking", 1) == 1:
            store.set("stop/asked", "")  # from here on nobody publishes a step and goes on
            steps = [step]
            for rank in range(self._control.world_size):
                if store.check([f"stop/step/{rank}"]):
                    steps.append(int(store.get(f"stop/step/{rank}")))
            store.set("stop/after", str(max(steps) + AGREE_EVERY))
        self._step_to_stop_after = int(store.get("stop/after"))
