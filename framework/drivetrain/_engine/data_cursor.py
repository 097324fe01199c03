"""How far a run's data was gone through, and how to go on: exactly where it stopped, or dealt anew to other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._loops.progress import Progress
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._sharding import EPOCH_START, ShardingOrigin


@dataclass(slots=True)
class Cursor:
    """Where the epoch under way was dealt from.

    Attributes:
        world_size: among how many ranks the data is dealt.
        epoch: the epoch that began under another dealing; -1 for none.
        begins: where its rest begins.
    """

    world_size: int = 1
    epoch: int = -1
    begins: ShardingOrigin = EPOCH_START

    def origin(self, epoch: int) -> ShardingOrigin:
        """Where the dealing of ``epoch`` begins."""
        return self.begins if epoch == self.epoch else EPOCH_START

    def state_dict(self, source: BatchSource | None) -> dict[str, Any]:
        """Return how the data is dealt; the counters are the progress's."""
        return {
            "world_size": self.world_size,
            "stride": None if source is None else source.stride,
            "epoch": self.epoch,
            "begins": list(self.begins),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], source: BatchSource, progress: Progress, new_loader: bool = False
    ) -> bool:
        """Go on where `state_dict` was taken; ``progress`` is loaded already, and may be counted anew.

        Args:
            state: as `state_dict` gave it.
            source: what the run reads now.
            progress: the counters.
            new_loader: the epoch, which has not begun, has a loader of its own: it need not be like the one before.

        Returns:
            Whether the data is dealt as it was then, so that everything about it can go on bit for bit.
        """
        alike = self.world_size == state["world_size"] and (new_loader or source.stride == state["stride"])
        if alike:
            self.epoch, self.begins = state["epoch"], ShardingOrigin(*state["begins"])
        elif progress.batch_idx:
            done, before = progress.epoch_samples, progress.batch_idx
            # Micro-batches of the new size that so many samples would have made.
            stride = source.stride
            number = -(-done // stride) if stride else -(-before * state["world_size"] // self.world_size)
            self.epoch, self.begins = progress.epoch, ShardingOrigin(done, number)
            progress.batch_idx = number
        return alike
