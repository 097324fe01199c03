"""Loaders that come again in the course of a fit: every so many epochs, at the same ones in a run that goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from drivetrain._engine.batches import BatchMover
from drivetrain._engine.evaluation_setup import build_validation
from drivetrain._engine.handshake import check_ranks_agree
from drivetrain._engine.resume_compatibility import data_facts
from drivetrain._engine.seeding import seed_rank
from drivetrain._engine.session_state import SessionState
from drivetrain._engine.stage_data import StageData
from drivetrain._engine.training_setup import epoch_data
from drivetrain._loops.train import TrainLoop
from drivetrain._runtime.generators import preserved_generators
from drivetrain._runtime.seed import derive_seed
from drivetrain.strategies.strategy import StepRunner

if TYPE_CHECKING:
    from drivetrain.checkpoint._format import Checkpoint

logger = logging.getLogger("drivetrain")

_LOADERS = 0x6C6F6164
"""Tells the seeds of what draws as loaders are built from others derived from the same numbers."""


class Reloading:
    """Asks for the loaders again at epochs 0, n, 2n, ...

    They are a function of the run's seed and of the epoch at which they are asked for: `trainer.current_epoch` is that
    epoch meanwhile, in a run that goes on within a later one too, and the generators are seeded by both, alike on every
    rank, and put back. So a run that goes on has the loaders of the run that was saved.

    Args:
        run: whose data they are.
        every: n.
        load: asks for the loaders.
    """

    def __init__(self, run: SessionState, every: int, load: Callable[[], StageData]) -> None:
        self._run = run
        self._every = every
        self._load = load
        self._of = 0  # the epoch of the loaders that are there
        self._feed: Callable[[StageData], None] | None = None

    def begin(self, opened: Checkpoint | None) -> None:
        """Ask for the loaders with which the run begins, or goes on from ``opened``."""
        run = self._run
        run.reload = self.bring
        if opened is not None:
            self._of = self._block(int(opened.progress["epoch"]))
        run.data = self._loaded()
        made_of = {} if opened is None else opened.state().get("made_of") or {}
        length, alike = made_of.get("length"), opened is not None
        if opened is not None:
            alike = opened.state()["data"]["world_size"] == run.strategy.data_world_size
        run.first_length = length if alike and isinstance(length, int) else run.data.train_length
        run.made_of["length"] = run.first_length
        if run.given.train is not None and run.strategy.rank == 0:
            logger.warning(
                "reload_dataloaders_every_n_epochs=%d, and fit was given its training loader: that one stays as it is. "
                "Loaders come again from train_dataloader of a data module or of the module.",
                self._every,
            )

    def feed(self, loop: TrainLoop, runner: StepRunner, move: BatchMover | None) -> None:
        """Give later loaders to ``loop``.

        Args:
            loop: the run's.
            runner: the strategy's callable that every step runs through.
            move: brings a batch to the device.
        """
        run = self._run

        def give(data: StageData) -> None:
            assert data.train is not None
            run.made_of["data"] = data_facts(data.train, data.loaders)
            if run.opening is not None:
                run.opening.read_from(data.train)
            run.validate = build_validation(run, runner, move) if data.sources.get("validate") else None
            loop.use(epoch_data(run, move), run.validate)

        self._feed = give

    def bring(self, epoch: int) -> None:
        """Ask for the loaders of ``epoch``, unless they are there. Collective.

        Raises:
            DistributedError: they differ between ranks.
            ConfigurationError: they cannot be trained on.
        """
        if self._block(epoch) == self._of:
            return
        run = self._run
        assert run.data is not None
        assert self._feed is not None
        run.data.close()
        self._of = self._block(epoch)
        run.data = self._loaded()
        check_ranks_agree(run.strategy.control, run.data.facts())
        self._feed(run.data)

    def _block(self, epoch: int) -> int:
        return epoch - epoch % self._every

    def _loaded(self) -> StageData:
        run = self._run
        before, run.progress.epoch = run.progress.epoch, self._of
        try:
            with preserved_generators(run.strategy.device):
                seed_rank(derive_seed(_LOADERS, run.seed, self._of), 0)
                return self._load()
        finally:
            run.progress.epoch = before
