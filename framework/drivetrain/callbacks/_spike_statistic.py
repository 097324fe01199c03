"""What is normal for a loss: a running median, and how far from it the middle half of the values lies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

_SIGMA = 1.4826  # standard deviations in a median absolute deviation of a normal distribution
_LEAST = 0.01  # of the median: a loss that hardly varies may still vary by this much


class SpikeStatistic:
    """Tells a spike from the losses of the last steps.

    Both the median and the median absolute deviation hold as long as fewer than half of the values are spikes. What
    lasts for half a window is normal from then on.

    Args:
        threshold: robust standard deviations above the median from which on a loss is a spike.
        window: over how many steps.
        warmup: so many steps have to be known before anything but NaN and infinity is one.
    """

    def __init__(self, threshold: float, window: int, warmup: int) -> None:
        self._threshold = threshold
        self._warmup = warmup
        self._known: deque[float] = deque(maxlen=window)

    @property
    def middle(self) -> float:
        """The median; NaN where nothing is known."""
        return median(self._known) if self._known else math.nan

    @property
    def limit(self) -> float:
        """The largest loss that is none."""
        if len(self._known) < self._warmup:
            return math.inf
        middle = self.middle
        deviation = _SIGMA * median(abs(value - middle) for value in self._known)
        return middle + self._threshold * max(deviation, _LEAST * abs(middle))

    def is_spike(self, loss: float) -> bool:
        """Whether the next step's loss is one. NaN and infinity always are."""
        return not math.isfinite(loss) or loss > self.limit

    def add(self, loss: float) -> None:
        """Learn from a step's loss, spike or not."""
        if math.isfinite(loss):
            self._known.append(loss)

    def state_dict(self) -> list[float]:
        """What is known."""
        return list(self._known)

    def load_state_dict(self, known: Iterable[float]) -> None:
        """Know what `state_dict` returned, and nothing else."""
        self._known = deque(known, maxlen=self._known.maxlen)
