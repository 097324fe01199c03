"""Rebuilds the loaders of a fit every n epochs. A resumed run rebuilds them at the same epochs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from drivetrain._distributed.control_plane import check_ranks_agree
from drivetrain._engine.assembly.evaluation_setup import build_validation
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.checkpoints.components import data_facts
from drivetrain._engine.ranks.seeding import seed_rank
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.seed import derive_seed

if TYPE_CHECKING:
    from drivetrain._engine.checkpoints.resumed_run import ResumedRun

logger = logging.getLogger("drivetrain")

_LOADER_SEED = 0x6C6F6164
"""A constant that makes the seeds used while loaders are built differ from others derived from the same numbers."""


class Reloading:
    """Builds the loaders at epochs 0, n, 2n, ..., for ``reload_dataloaders_every_n_epochs=n``.

    A resumed run has the same loaders as the saved run, since loaders depend only on the run's seed and the epoch at
    which they are built. While they are built, `trainer.current_epoch` is that epoch, even in a run that is resumed
    in a later epoch, and the random generators are seeded from the run's seed and that epoch, the same on every rank.
    The generators are restored afterwards.

    Args:
        run: the run.
    """

    def __init__(self, run: RunCore) -> None:
        self._run = run
        self._every = run.trainer.reload_dataloaders_every_n_epochs
        self._loaded_at = 0  # the epoch of the current loaders

    def begin(self, resumed: ResumedRun | None) -> None:
        """Build the first loaders of the run: the loaders of epoch 0, or of the epoch in which ``resumed`` goes on."""
        run, data = self._run, self._run.data
        data.reload = self.reload
        if resumed is not None:
            self._loaded_at = self._first_epoch(int(resumed.checkpoint.progress["epoch"]))
        self._load()
        length = data.train_length
        if resumed is not None and resumed.state["data"]["world_size"] == run.strategy.data_world_size:
            saved = (resumed.state.get("components") or {}).get("length")
            length = saved if isinstance(saved, int) else length
        data.counted_from = length, 0, 0
        run.components["length"] = length
        if run.request.train is not None and run.strategy.rank == 0:
            logger.warning(
                "reload_dataloaders_every_n_epochs=%d, but a training loader was passed to fit: it is not rebuilt. "
                "Only the loaders that train_dataloader of the module or of a data module returns are rebuilt.",
                self._every,
            )

    def reload(self, epoch: int) -> None:
        """Build the loaders of ``epoch``, unless they are the current ones. Collective.

        Raises:
            DistributedError: the loaders differ between ranks.
            ConfigurationError: the loaders cannot be used for training.
        """
        if self._first_epoch(epoch) == self._loaded_at:
            return
        run, data, loop = self._run, self._run.data, self._run.loop
        assert loop is not None
        data.close()
        self._loaded_at = self._first_epoch(epoch)
        self._load()
        check_ranks_agree(run.strategy.control, data.facts())
        run.components["data"] = data_facts(data.train, data.loaders)
        loop.reader.use(data.training)
        loop.validation.renew(build_validation(run) if data.validates else None, data.train_length)

    def _first_epoch(self, epoch: int) -> int:
        """Return the first of the epochs that share the loaders of ``epoch``."""
        return epoch - epoch % self._every

    def _load(self) -> None:
        progress = self._run.progress
        current, progress.epoch = progress.epoch, self._loaded_at
        try:
            with preserved_generators(self._run.strategy.device):
                seed_rank(derive_seed(_LOADER_SEED, self._run.data.seed, self._loaded_at), 0)
                self._run.data.load()
        finally:
            progress.epoch = current
