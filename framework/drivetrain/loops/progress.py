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

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, int(state[field.name]))
