"""Whether frozen weights were moved by hand where ZeRO does not see it."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._manual_updates import PARTITIONED, ROUNDED, moved_by_hand

_VERSION = attrgetter("_version")
_PARTITION = attrgetter("ds_tensor._version")


class FrozenWeights:
    """Compares the version counters of frozen weights, which count in-place operations, with those of before.

    What is written through ``.data`` is not counted.

    Args:
        module: the user's, as DeepSpeed has left it.
        stage: of ZeRO.
        rounded: whether the module computes with copies in half precision.
    """

    def __init__(self, module: nn.Module, stage: int, rounded: bool) -> None:
        self._names = [name for name, one in module.named_parameters() if not one.requires_grad]
        self._weights: list[Any] = [one for one in module.parameters() if not one.requires_grad]
        self._strategy = f"DeepSpeedStrategy(stage={stage})"
        self._rounded = rounded
        if not rounded and stage < 3:
            self._names, self._weights = [], []  # they are what is computed with and saved
        self.watches = bool(self._weights)
        """Whether there is anything to compare."""
        self._partitions = self._weights if stage == 3 and not rounded else []
        self.accept()

    def accept(self) -> None:
        """Take them as they are: somebody has loaded them."""
        self._versions = tuple(map(_VERSION, self._weights))
        self._partitioned = tuple(map(_PARTITION, self._partitions))

    def check(self) -> None:
        """Refuse what was moved since the last time.

        Raises:
            ConfigurationError: names the weights.
        """
        lost = self.lost()
        if lost is not None:
            raise lost

    def lost(self) -> ConfigurationError | None:
        """Return the refusal of what was moved since the last time, where the move is lost."""
        versions = tuple(map(_VERSION, self._weights))
        if versions == self._versions:
            return None
        moved = [
            number for number, (one, other) in enumerate(zip(versions, self._versions, strict=True)) if one != other
        ]
        if self._partitions:  # what was gathered to be written to has gone to the partitions
            now = tuple(map(_PARTITION, self._partitions))
            moved = [number for number in moved if now[number] == self._partitioned[number]]
        if moved:
            names = [self._names[number] for number in moved]
            return moved_by_hand(names, self._strategy, ROUNDED if self._rounded else PARTITIONED)
        self.accept()
        return None
