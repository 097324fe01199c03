"""How far a run has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Progress:
    """The counters of a run. Plain attributes, written by the loops."""

    epoch: int = 0
    """Epochs completed."""
    global_step: int = 0
    """Optimizer steps made."""
    batch_idx: int = 0
    """Micro-batches of the current epoch that this rank has trained on."""
    micro_batches: int = 0
    """Micro-batches this rank has trained on in all."""
    samples_seen: int = 0
    """Samples trained on by all ranks together."""
    epoch_samples: int = 0
    """Those of the current epoch: how far its order was gone through."""
    within_window: bool = False
    """Whether micro-batches were trained on whose step is not made yet."""
    window: tuple[int, int] = (0, 0)
    """Micro-batches of the epoch, and samples, before the window under way."""
    cut_short: bool = False
    """Whether training is over, and its last epoch ended before its data: a run that goes on is still within it."""

    def back_to_the_window(self) -> None:
        """Count as before the window whose step is not made: weights and optimizers are as they were then."""
        if self.within_window:
            batch_idx, samples = self.window
            self.micro_batches -= self.batch_idx - batch_idx
            self.epoch_samples -= self.samples_seen - samples
            self.batch_idx, self.samples_seen, self.within_window = batch_idx, samples, False

    def state_dict(self) -> dict[str, int]:
        of_this_run = ("within_window", "window", "cut_short")
        return {name: value for name, value in asdict(self).items() if name not in of_this_run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            if name in state:
                setattr(self, name, int(state[name]))


@dataclass(slots=True)
class Position:
    """Which loop goes through batches now, and at which. The loops write it; a failure leaves it as it was then."""

    loop: str | None = None
    """"training", "evaluation" or "prediction"; None between them."""
    batch_idx: int = 0
    """The index of the micro-batch that the loop has come to."""
    weight: float = 0.0
    """Over how many items its loss is a mean; of training's."""
    indices: Sequence[Any] | None = None
    """The data-set indices of its samples; of prediction's, where they are known."""

    def enter(self, loop: str) -> tuple[str | None, int]:
        """Go through batches from the first; returns what to `leave` with: the loop that has to wait, and its batch."""
        before = self.loop, self.batch_idx
        self.loop, self.batch_idx = loop, 0
        return before

    def leave(self, before: tuple[str | None, int]) -> None:
        """Be through, with no failure."""
        self.loop, self.batch_idx = before
