"""EpochPosition: how the samples of an epoch are split over ranks, so that a run can resume at any world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.sharding import EPOCH_START, EpochOffset
from drivetrain._run_state import Progress
from drivetrain.errors import ConfigurationError


@dataclass(slots=True)
class EpochPosition:
    """How the current epoch's samples are distributed over ranks.

    Attributes:
        world_size: the number of ranks that the data is sharded over.
        epoch: the epoch that began with another sharding before the run was resumed; -1 for none.
        begins: the position from which the rest of that epoch is sharded anew.
        samples: the number of samples with which the saved epoch began; None if it is unknown.
        is_split_as_saved: whether the data is split as in the saved run, so that the run can resume bit for bit.
    """

    world_size: int = 1
    epoch: int = -1
    begins: EpochOffset = EPOCH_START
    samples: int | None = None
    is_split_as_saved: bool = False

    def origin(self, epoch: int) -> EpochOffset:
        """Return the position from which ``epoch`` is sharded."""
        return self.begins if epoch == self.epoch else EPOCH_START

    def state_dict(self, source: BatchSource | None) -> dict[str, Any]:
        """Return how the data is sharded. The number of samples used is in `Progress`."""
        return {
            "world_size": self.world_size,
            "stride": None if source is None else source.stride,
            "epoch": self.epoch,
            "begins": list(self.begins),
            "samples": None if source is None else source.samples,
        }

    def check_samples(self, source: BatchSource) -> None:
        """Check that an epoch that is resumed within has as many samples as it began with.

        Raises:
            ConfigurationError: the number of samples differs.
        """
        if None not in (self.samples, source.samples) and self.samples != source.samples:
            raise ConfigurationError(
                f"The epoch that is resumed began with {self.samples} training samples, and now has {source.samples}.",
                "the rest of the epoch cannot be read in the order in which it began: samples would be used twice or "
                "never.",
                "give the data set the size that it had, for example in on_fit_start or in load_state_dict of a data "
                "module, or resume from a checkpoint at an epoch's end.",
            )

    def load_state_dict(
        self, state: Mapping[str, Any], source: BatchSource, progress: Progress, new_loader: bool = False
    ) -> None:
        """Resume from ``state``. If the sharding differs, convert ``progress.batch_idx`` to the new batch size.

        Args:
            state: the state that `state_dict` returned.
            source: the batches of this run.
            progress: the counters, which are loaded already.
            new_loader: whether no batch of the epoch is used yet and the epoch has a new loader, perhaps with another
                batch size.
        """
        self.samples = state["samples"]
        same_stride = new_loader or source.stride == state["stride"]
        self.is_split_as_saved = self.world_size == state["world_size"] and same_stride
        if self.is_split_as_saved:
            self.epoch, self.begins = state["epoch"], EpochOffset(*map(int, state["begins"]))
        elif progress.batch_idx:
            done, before = progress.epoch_samples, progress.batch_idx
            # The number of micro-batches of the new size that contain the used samples.
            stride = source.stride
            number = -(-done // stride) if stride else -(-before * state["world_size"] // self.world_size)
            self.epoch, self.begins = progress.epoch, EpochOffset(done, number)
            progress.batch_idx = number
