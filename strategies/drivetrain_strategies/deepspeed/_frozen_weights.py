"""Detects updates of frozen weights by user code that ZeRO would drop."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from drivetrain.errors import ConfigurationError, listed

_VERSION = attrgetter("_version")

_PARTITIONED = (
    "the weights are partitioned, so the update changed empty tensors, but not the partitions.",
    "update the weights within deepspeed.zero.GatheredParameters(weights, modifier_rank=0), or use 'fsdp' or 'ddp'.",
)
_ROUNDED = (
    "the update changed half-precision copies, but not the float32 weights, which checkpoints save.",
    "use precision='32-true', or strategy='fsdp' or 'ddp'. To average trainable weights, use EMAWeightAveraging.",
)
"""Why an update is lost, and the fix."""


class FrozenWeights:
    """Detects in-place updates of frozen weights that would be lost, from the tensors' version counters.

    Writes through ``.data`` do not change the counters and are not detected. In single precision at stages 1 and 2,
    checkpoints save the module's own frozen weights, so no update is lost.

    Args:
        module: the user's module after DeepSpeed's setup.
        stage: ZeRO stage.
        rounded: whether the module computes with half-precision copies of the weights.
    """

    def __init__(self, module: nn.Module, stage: int, rounded: bool) -> None:
        frozen: dict[str, Any] = {name: one for name, one in module.named_parameters() if not one.requires_grad}
        self.weights = frozen if rounded or stage == 3 else {}
        """The frozen weights of which updates could be lost, by name."""
        self._strategy = f"DeepSpeedStrategy(stage={stage})"
        self._rounded = rounded
        self.accept_current_values()

    def accept_current_values(self) -> None:
        """Treat the current values as unmodified, for example after a load."""
        self._counts = tuple(map(_VERSION, self.weights.values()))
        # An update within GatheredParameters changes the partition, too, and is kept unless weights are rounded.
        self._versions = {
            name: (weight._version, None if self._rounded else weight.ds_tensor._version)
            for name, weight in self.weights.items()
        }

    def lost_update(self) -> ConfigurationError | None:
        """Return the error for updates since the last call that would be lost. None if there are no such updates."""
        if tuple(map(_VERSION, self.weights.values())) == self._counts:
            return None  # in most steps, after one comparison
        before = self._versions
        self.accept_current_values()
        names = [
            name
            for name, (version, part) in self._versions.items()
            if version != before[name][0] and part == before[name][1]
        ]
        if not names:
            return None
        return ConfigurationError(
            f"User code updated weights under {self._strategy}: {listed(names)}.",
            *(_ROUNDED if self._rounded else _PARTITIONED),
        )
