"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
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

    def state_dict(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if name != "within_window"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            if field.name in state:
                setattr(self, field.name, int(state[field.name]))
