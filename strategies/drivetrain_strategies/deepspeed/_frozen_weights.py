"""Detects updates of frozen weights by user code that ZeRO would drop."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._manual_updates import PARTITIONED, ROUNDED, manual_update_error

_VERSION = attrgetter("_version")
_PARTITION_VERSION = attrgetter("ds_tensor._version")


class FrozenWeights:
    """Detects in-place updates of frozen weights from the tensors' version counters.

    Writes through ``.data`` do not change the counters and are not detected.

    Args:
        module: the user's module after DeepSpeed's setup.
        stage: ZeRO stage.
        rounded: whether the module computes with half-precision copies of the weights.
    """

    def __init__(self, module: nn.Module, stage: int, rounded: bool) -> None:
        self._names = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        self._weights: list[Any] = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._strategy = f"DeepSpeedStrategy(stage={stage})"
        self._rounded = rounded
        if not rounded and stage < 3:
            self._names, self._weights = [], []  # checkpoints save the module's own weights, so no update is lost
        self.has_weights = bool(self._weights)
        """Whether updates of any frozen weight could be lost."""
        self._partitions = self._weights if stage == 3 and not rounded else []
        self.accept_current_values()

    def accept_current_values(self) -> None:
        """Treat the current values as unmodified, for example after a load."""
        self._versions = tuple(map(_VERSION, self._weights))
        self._partition_versions = tuple(map(_PARTITION_VERSION, self._partitions))

    def check(self) -> None:
        """Refuse updates that user code made since the last call and that would be lost.

        Raises:
            ConfigurationError: names the weights.
        """
        lost_update = self.lost_update()
        if lost_update is not None:
            raise lost_update

    def lost_update(self) -> ConfigurationError | None:
        """Return the error for updates since the last call that would be lost. None if there are no such updates."""
        versions = tuple(map(_VERSION, self._weights))
        if versions == self._versions:
            return None
        updated = [
            number
            for number, (version, earlier) in enumerate(zip(versions, self._versions, strict=True))
            if version != earlier
        ]
        if self._partitions:  # an update within GatheredParameters was written to the partition and is kept
            partition_versions = tuple(map(_PARTITION_VERSION, self._partitions))
            updated = [number for number in updated if partition_versions[number] == self._partition_versions[number]]
        if updated:
            names = [self._names[number] for number in updated]
            return manual_update_error(names, self._strategy, ROUNDED if self._rounded else PARTITIONED)
        self.accept_current_values()
        return None
