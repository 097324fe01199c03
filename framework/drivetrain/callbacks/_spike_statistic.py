"""A robust running estimate of a loss: its median and its median absolute deviation (MAD)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

_MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation divided by its MAD
_MIN_DEVIATION = 0.01  # lower bound of the deviation, as a fraction of the median


class SpikeStatistic:
    """Detects loss spikes from the losses of the last ``window`` steps.

    Spikes hardly affect the median and the MAD as long as fewer than half of the values are spikes. A higher loss that
    lasts for half a window is no longer a spike. The robust standard deviation is the MAD times 1.4826, but at least 1%
    of the median.

    Args:
        threshold: the number of robust standard deviations above the median beyond which a loss is a spike.
        window: the number of steps to remember.
        warmup: the number of steps to observe before a finite loss can be a spike.
    """

    def __init__(self, threshold: float, window: int, warmup: int) -> None:
        self._threshold = threshold
        self._warmup = warmup
        self._losses: deque[float] = deque(maxlen=window)

    @property
    def median(self) -> float:
        """The median of the losses in the window; NaN before the first loss."""
        return statistics.median(self._losses) if self._losses else math.nan

    @property
    def limit(self) -> float:
        """The largest loss that is not a spike; infinite during warm-up."""
        if len(self._losses) < self._warmup:
            return math.inf
        median = self.median
        deviation = _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in self._losses)
        return median + self._threshold * max(deviation, _MIN_DEVIATION * abs(median))

    def is_spike(self, loss: float) -> bool:
        """Return whether the next step's loss is a spike. NaN and infinity are always spikes."""
        return not math.isfinite(loss) or loss > self.limit

    def add(self, loss: float) -> None:
        """Add a step's loss to the window, even if the loss is a spike. Non-finite losses are ignored."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state_dict(self) -> list[float]:
        """Return the losses in the window."""
        return list(self._losses)

    def load_state_dict(self, losses: Iterable[float]) -> None:
        """Restore the losses that `state_dict` returned."""
        self._losses = deque(losses, maxlen=self._losses.maxlen)
