"""Checks, without writing anything, that the state that a run will save can be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from drivetrain._engine.run_checkpoint import RunCheckpoint
from drivetrain._engine.run_parts import RunCore
from drivetrain._loops.save_requests import SaveRequests
from drivetrain._runtime.generators import preserved_generators
from drivetrain.callback import KeepsCheckpoints, folders_of
from drivetrain.checkpoint._format import check_metadata, copy_to_host, run_collectively
from drivetrain.errors import CheckpointError

logger = logging.getLogger("drivetrain")


class SaveRehearsal:
    """Does everything that a save does, except copying and writing.

    Args:
        core: the run, in which a callback writes checkpoints.
        optimizers: the optimizers of the run.
        requests: the requests through which the training loop repeats the rehearsal.
        run_state: returns the state of the run to save.
    """

    def __init__(
        self,
        core: RunCore,
        optimizers: Sequence[Optimizer],
        requests: SaveRequests,
        run_state: Callable[[], RunCheckpoint],
    ) -> None:
        self._core = core
        self._optimizers = optimizers
        self._requests = requests
        self._run_state = run_state
        self._saves_resumable = any(
            isinstance(callback, KeepsCheckpoints) and callback.saves_resumable and folders_of([callback])
            for callback in core.callbacks
        )

    def run(self) -> None:
        """Check that the state can be saved. Collective.

        If all callbacks save only weights, the rest of the state is saved only after a preemption signal, and a problem
        with the rest is logged as a warning.

        Raises:
            CheckpointError: a part of the state cannot be saved. The error is raised on every rank.
        """
        core = self._core
        with preserved_generators(core.strategy.device):  # the hooks that a save calls may use the generators
            self._check(weights_only=not self._saves_resumable)
            if not self._saves_resumable and core.saves_on_signals:
                try:
                    self._check(weights_only=False)
                except CheckpointError as error:
                    if core.strategy.rank == 0:
                        logger.warning(
                            "After a preemption signal this run could not save a checkpoint to resume from: %s", error
                        )

    def repeat_after_first_step(self) -> None:
        """Request that `run` is repeated once after the first step, which creates the state of most optimizers.

        In manual optimization, an optimizer may step for the first time later. The check is then repeated after that
        step too.
        """
        core = self._core
        if not self._saves_resumable and not core.saves_on_signals:
            return  # no checkpoint of this run will contain optimizer state
        before = core.progress.global_step
        waiting = [] if core.module.automatic_optimization else [each for each in self._optimizers if not each.state]

        def repeat() -> None:
            if core.progress.global_step == before:  # the first windows may make no step
                self._requests.ask(repeat)
                return
            self.run()
            for optimizer in waiting:
                if not optimizer.state:
                    self._repeat_after_step_of(optimizer)

        self._requests.ask(repeat)

    def _repeat_after_step_of(self, optimizer: Optimizer) -> None:
        def ask(*_: Any) -> None:
            handle.remove()
            self._requests.ask(self.run)

        handle = optimizer.register_step_post_hook(ask)

    def _check(self, weights_only: bool) -> None:
        control, checkpoint = self._core.strategy.control, self._run_state()
        contents = checkpoint.contents(weights_only, dry_run=True)
        staged = copy_to_host(contents, control.rank, control.world_size, checkpoint.shard_of)

        def check() -> None:
            if staged.problem is not None:
                raise staged.problem
            check_metadata(contents.metadata)

        run_collectively(control, "The state of this run cannot be saved", check)
