"""CheckpointManager: writes the checkpoints of a run, and rolls the run back to one of them.

`CheckpointManager.save` gets all requests. It carries them out at points from which a run can be resumed: outside an
epoch a `SaveRequest` at once; a function, and all requests within an epoch, when the loop calls `carry_out_requests`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from drivetrain._distributed.control_plane import ControlPlane, LocalControl
from drivetrain._runtime.generators import preserved_generators
from drivetrain.callback import FollowsRollbacks, KeepsCheckpoints, SavesBeforeLeaving, folders_of
from drivetrain.checkpoint.save_request import SaveRequest
from drivetrain.errors import CheckpointError, ConfigurationError

# The code that reads and writes checkpoints is imported on use, because many runs neither read nor write any.
if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore
    from drivetrain._engine.checkpoints.saved_state import SavedState
    from drivetrain._format import CheckpointMetadata, CheckpointReader, StateToSave
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

Request = SaveRequest | Callable[[], SaveRequest | None]
"""A checkpoint to write, or a function that decides at the next point from which the run can be resumed."""


class CheckpointManager:
    """Writes the checkpoints of a run, and rolls the run back to one of them.

    Args:
        core: the run.
    """

    def __init__(self, core: RunCore) -> None:
        self._core = core
        self.waiting: list[Request] = []
        """What to do at the next point from which the run can be resumed. The loop checks whether there is anything."""
        self.rollback: Callable[[], None] | None = None
        """Loads an earlier checkpoint. The loop calls the function after leaving the epoch. None without a request."""
        self.in_epoch = False
        """Whether an epoch's batches are read, or its end is processed: a save then has to wait, because some hooks of
        the current event, or parts of the current step, have run and others have not."""
        self.run_failed = False
        """Whether the run has failed. What is saved afterwards is the state before the step that failed."""
        self.opened: CheckpointReader | None = None
        """The checkpoint that the run starts from, if any."""
        self.written: str | None = None
        """The path of the last checkpoint that this run completed."""
        # Identifies this run in checkpoint lineages. Only rank 0's value is stored.
        self._lineage_id = os.urandom(8).hex()
        self._ancestors: tuple[tuple[str, int], ...] = ()
        self._parent_checkpoint_id = ""  # the parent of the next checkpoint; "" for none
        self._checkpoints_written = 0
        self._writing: Future[None] | None = None  # the checkpoint that is being written in the background
        self._background_control: ControlPlane | None = None
        self._warned_of_no_save = False

    @cached_property
    def saved_state(self) -> SavedState:
        """What checkpoints hold of the run."""
        from drivetrain._engine.checkpoints.saved_state import SavedState

        return SavedState(self._core)

    def continue_lineage(self, metadata: CheckpointMetadata) -> None:
        """Make the checkpoints of this run descend from the one that it resumes."""
        self._ancestors, self._parent_checkpoint_id = metadata.lineage, metadata.identifier

    # Requests

    def save(self, request: Request) -> None:
        """Write a checkpoint, now or at the next point of the current epoch from which the run can be resumed.

        Collective. A function is called at the next such point, after all hooks of the event. In a run that has failed,
        the state before the step that failed is saved at once.

        Raises:
            ConfigurationError: the run has ended, and this process does not have the whole state to resume from; or it
                has failed within a step.
            CheckpointError: this checkpoint or an earlier background save could not be written. The error is raised on
                every rank.
        """
        if self._core.strategy.module is None:
            self._check_state_is_whole(request)
        if self.run_failed:
            self._save_after_failure(request)
        elif callable(request) or self.in_epoch:
            self.waiting.append(request)
        else:
            with self._core.span("checkpoint"):
                self._write(request)

    def carry_out_requests(self) -> None:
        """Write the requested checkpoints, unless a rollback was requested, which cancels them. Collective."""
        waiting = self.waiting[:]
        self.waiting.clear()
        if waiting and self.rollback is None:
            with self._core.span("checkpoint"), self._at_resumable_point():
                for request in waiting:
                    self._carry_out(request)

    def _carry_out(self, request: Request) -> None:
        decided = request() if callable(request) else request
        if decided is not None:
            self._write(decided)

    @contextmanager
    def _at_resumable_point(self) -> Iterator[None]:
        """Let saves be written at once within the block, because a run can be resumed from the current state."""
        in_epoch, self.in_epoch = self.in_epoch, False
        try:
            yield
        finally:
            self.in_epoch = in_epoch

    # Writing

    def _write(self, request: SaveRequest) -> None:
        from drivetrain._format import prepare_checkpoint, write_checkpoint

        core, strategy, saved = self._core, self._core.strategy, self.saved_state
        contents = saved.collect(request.weights_only, request.trainable_only)
        contents.hash_algorithm = request.digest
        metadata = contents.metadata = self._with_lineage(contents.metadata, request.identifier)
        rank, is_running = strategy.rank, strategy.module is not None
        if rank == 0 and core.trainer.loggers:
            _flush_loggers(core.trainer)
        if not is_running and rank > 0:
            return  # the run has ended: every rank holds the whole state, and the ranks no longer communicate
        control = strategy.control if is_running else LocalControl()
        shards_of = saved.shards_of if is_running else dict
        in_background = request.background and is_running
        prepared = prepare_checkpoint(contents, control.rank, control.world_size, shards_of, copy=in_background)

        def write(control: ControlPlane) -> None:
            write_checkpoint(request.path, prepared, control)
            self.written = request.path
            if request.on_complete is not None:
                request.on_complete()
            if rank == 0:
                core.folder.notes.note_checkpoint(request.path, metadata)

        if in_background:
            self._write_in_background(write)
        else:
            write(control)

    def _with_lineage(self, metadata: CheckpointMetadata, identifier: str) -> CheckpointMetadata:
        """Return metadata with identifier, parent and lineage set, and make this checkpoint the parent of the next."""
        parent, self._parent_checkpoint_id = self._parent_checkpoint_id, identifier or os.urandom(16).hex()
        self._checkpoints_written += 1
        folder, module = self._core.folder, self.saved_state.module_class
        run = {"id": folder.id, "name": folder.name, "folder": _absolute(folder.path), "module": module}
        return replace(
            metadata,
            identifier=self._parent_checkpoint_id,
            parent=parent,
            lineage=(*self._ancestors, (self._lineage_id, self._checkpoints_written)),
            run=run if folder.id else {},
        )

    def _write_in_background(self, write: Callable[[ControlPlane], None]) -> None:
        """Write a copy of the state in a thread, whose ranks communicate apart from those of training.

        An error is raised at the next point from which the run can be resumed, at most one step later.
        """
        self._wait()
        if self._background_control is None:
            self._background_control = self._core.strategy.control.clone()

        def raise_soon(done: Future[None]) -> None:
            if done.exception() is not None:
                self.waiting.append(self._wait)

        thread = ThreadPoolExecutor(1, "checkpoint-write")
        self._writing = thread.submit(write, self._background_control)
        self._writing.add_done_callback(raise_soon)
        thread.shutdown(wait=False)  # the interpreter waits at exit until the checkpoint is written

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    # The end of a run

    def finish(self) -> None:
        """Wait for the checkpoint that is being written in the background.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._writing is not None:
            with self._core.span("checkpoint"):
                self._wait()

    def abandon(self) -> None:
        """Wait for the checkpoint that is being written in the background. Its errors are ignored: the run failed."""
        for request in self.waiting:
            if isinstance(request, SaveRequest):
                text = "The checkpoint %r is not written: the run failed before the end of the step or event."
                logger.warning(text, request.path)
        self.waiting.clear()
        if self._writing is not None:
            wait([self._writing])
            self._writing = None

    def save_before_leaving(self) -> None:
        """Let the callbacks save a checkpoint to resume from, and wait until it is complete. Collective.

        Raises:
            CheckpointError: a checkpoint could not be written. The error is raised on every rank.
        """
        self.finish()
        core = self._core
        with self._at_resumable_point():
            savers = [callback for callback in core.callbacks if isinstance(callback, SavesBeforeLeaving)]
            saved = [callback.save_before_leaving(core.trainer, core.module) for callback in savers]
        self.carry_out_requests()
        self.finish()
        if not any(saved) and core.strategy.rank == 0 and not core.request.trial and not self._warned_of_no_save:
            # This method runs a second time if the run stops at the end of an epoch.
            self._warned_of_no_save = True
            logger.warning(
                "The run ends early and nothing is saved: it has no Checkpoint callback, and no other callback saves a "
                "checkpoint in save_before_leaving."
            )

    def _check_state_is_whole(self, request: Request) -> None:
        """Check that this process has the state that is to be saved after the run.

        Raises:
            ConfigurationError: the run has left this process without a part of the state, or failed within a step.
        """
        core, optimizers = self._core, self._core.optimization.optimizers
        held = {id(parameter) for parameter in core.module.parameters()}
        ran_elsewhere = not core.callbacks.collected or core.strategy.world_size > 1
        trained = (each for one in optimizers for group in one.param_groups for each in group["params"])
        lacks_state = ran_elsewhere or any(id(each) not in held for each in trained)
        if lacks_state and isinstance(request, SaveRequest) and not request.weights_only:
            raise ConfigurationError(
                f"save_checkpoint after a run under {type(core.strategy).__name__}.",
                "a resumed run needs the state of every rank, and this process has the trained weights alone.",
                "call save_checkpoint within the run, for example in on_train_end, or with weights_only=True.",
            )
        if self.run_failed and self._is_within_step():
            raise ConfigurationError(
                "save_checkpoint after a run that failed within a step.",
                "the buffers, and perhaps the weights, are those of half a step.",
                "Checkpoint(save_on_exception=True) saves the state before the step that failed.",
            )

    def _save_after_failure(self, request: Request) -> None:
        """Save the state that a failed run had after its last whole step; log a warning if this state is lost."""
        core, snapshot, is_half_step = self._core, self._core.snapshot, self._is_within_step()
        if core.strategy.world_size > 1:
            logger.warning("Nothing is saved after the failure: the other ranks have ended, and their state is lost.")
            return
        # The snapshot of the last window is outdated once the epoch's end, such as its validation, has begun.
        if snapshot is not None and (is_half_step or core.current.loop == "training"):
            snapshot.go_back()
        if is_half_step and (snapshot is None or not snapshot.is_whole):
            kept = snapshot is not None and snapshot.every_step
            why = "is lost, since weights had changed" if kept else "was not kept by Checkpoint(save_on_exception=True)"
            logger.warning("Nothing is saved after the failure: the state before the step that failed %s.", why)
            return
        core.progress.reset_to_window_start()
        self.abandon()  # an earlier save that ended later would be named as the newest
        self._carry_out(request)

    def _is_within_step(self) -> bool:
        """Return whether a run that failed did so within a micro-batch, a window, or the step of a scheduler."""
        current, progress, loop = self._core.current, self._core.progress, self._core.loop
        in_micro_batch = current.loop == "training" and current.batch_idx == progress.batch_idx
        return in_micro_batch or progress.within_window or (loop is not None and loop.schedulers.is_stepping)

    # The rehearsal: everything that a save does, except copying and writing

    def rehearse_saves(self) -> None:
        """Check that the state that the callbacks will save can be saved: now, and after the first step. Collective.

        The first step creates the state of most optimizers. In manual optimization, each optimizer's first step counts.

        Raises:
            CheckpointError: a part of the state cannot be saved. The error is raised on every rank.
        """
        core = self._core
        if not folders_of(core.callbacks):
            return
        saves_resumable = any(
            isinstance(callback, KeepsCheckpoints) and callback.saves_resumable and folders_of([callback])
            for callback in core.callbacks
        )
        rehearse = partial(self._rehearse, saves_resumable)
        rehearse()
        if not saves_resumable and not core.saves_on_signals:
            return  # no checkpoint of this run will contain optimizer state
        before = core.progress.global_step

        def repeat() -> None:
            if core.progress.global_step == before:  # the first windows may make no step
                self.waiting.append(repeat)
            else:
                rehearse()

        if core.module.automatic_optimization:
            self.waiting.append(repeat)
            return
        for optimizer in self._core.optimization.optimizers:
            self._request_after_step(optimizer, rehearse)

    def _request_after_step(self, optimizer: Optimizer, rehearse: Callable[[], None]) -> None:
        def request(*_: Any) -> None:
            handle.remove()
            if rehearse not in self.waiting:
                self.waiting.append(rehearse)

        handle = optimizer.register_step_post_hook(request)

    def _rehearse(self, saves_resumable: bool) -> None:
        """Collect the state.

        If all callbacks save only weights, the rest of the state is saved only after a preemption signal, and a problem
        with the rest is logged as a warning.
        """
        core = self._core
        with preserved_generators(core.strategy.device):  # the hooks that a save calls may use the generators
            self._check_contents(self.saved_state.collect(not saves_resumable, rehearsing=True))
            if not saves_resumable and core.saves_on_signals:
                try:
                    self._check_contents(self.saved_state.collect(False, rehearsing=True))
                except CheckpointError as error:
                    if core.strategy.rank == 0:
                        text = "After a preemption signal this run could not save a checkpoint to resume from: %s"
                        logger.warning(text, error)

    def _check_contents(self, contents: StateToSave) -> None:
        from drivetrain._format import check_metadata, prepare_checkpoint, run_collectively

        control = self._core.strategy.control
        prepared = prepare_checkpoint(contents, control.rank, control.world_size, self.saved_state.shards_of)

        def check() -> None:
            if prepared.problem is not None:
                raise prepared.problem
            check_metadata(contents.metadata)

        run_collectively(control, "The state of this run cannot be saved", check)

    # Rolling back

    def newest_up_to(self, step: int) -> tuple[str, int] | None:
        """Return the path and step of this run's newest checkpoint at or before ``step``, or None. Collective."""
        from drivetrain._format import load

        self.finish()
        control, found = self._core.strategy.control, None
        if control.rank == 0:
            keepers = [each for each in self._core.callbacks if isinstance(each, KeepsCheckpoints)]
            for path in {path for keeper in keepers for path in keeper.kept_checkpoints}:
                with suppress(CheckpointError):  # another process removed the checkpoint
                    checkpoint = load(path)
                    saved_step = checkpoint.progress["global_step"]
                    is_newer = saved_step <= step and (found is None or saved_step > found[1])
                    if is_newer and not checkpoint.weights_only:
                        found = path, saved_step
        found = control.broadcast_object(found)
        return None if found is None else (found[0], found[1])

    def roll_back(self, path: str) -> None:
        """Roll back to a checkpoint of this run, once all hooks of the current event have run. Collective.

        Callbacks are notified before and after the rollback. The state of callbacks is loaded in between.

        Raises:
            CheckpointError: the checkpoint cannot be opened. Damaged contents raise the error later, in the loop.
            ConfigurationError: the checkpoint has other optimizers or schedulers, which ``allow`` has permitted.
        """
        from drivetrain._engine.checkpoints.components import StartsAnew, differences_from
        from drivetrain._format import load, run_collectively

        core, allow = self._core, self._core.request.allow
        checkpoint = run_collectively(
            core.strategy.control, f"The checkpoint {path!r} cannot be opened", lambda: load(path)
        )
        found = differences_from(checkpoint, checkpoint.state(), self._core.components, core.strategy)
        replaced = [each for each in found if each.kind in ("optimizer", "scheduler") and each.kind in allow]
        if replaced:
            raise ConfigurationError(
                f"The run cannot go back to {path!r}: it had {replaced[0].saved}, and this run {replaced[0].now}.",
                "the state in the checkpoint does not belong to what started anew in this run (fit's argument allow).",
                "save a checkpoint soon after the start of this run, to which it can go back.",
            )

        def load_now() -> None:
            self.waiting.clear()  # it is in there itself if a save that was carried out has requested the rollback
            self.finish()
            followers = [callback for callback in core.callbacks if isinstance(callback, FollowsRollbacks)]
            for callback in followers:
                callback.before_rollback(core.trainer, core.module)
            self.saved_state.load(checkpoint, StartsAnew())
            if core.strategy.rank == 0:
                core.folder.notes.note("rolled back", f"to {path}", core.progress.global_step)
            for callback in followers:
                callback.after_rollback(core.trainer, core.module, path)

        self.rollback = load_now
        self.waiting.append(load_now)  # so that the loop notices it, leaves the epoch, and calls `rollback`


def _absolute(folder: str | None) -> str:
    """Return the folder as an absolute path or URL, which is valid in any working directory."""
    return "" if folder is None else folder if "://" in folder else os.path.abspath(folder)


def _flush_loggers(trainer: RunContext) -> None:
    """Make loggers write their buffered rows, so that a run that is resumed from the checkpoint finds all rows."""
    saves = [(type(each).__name__, each.save) for each in trainer.loggers]
    for name, write in [("A logger", trainer.finish_logging), *saves]:
        try:
            write()
        except Exception as error:  # each service has its own errors, and none may prevent a checkpoint
            logger.warning("%s could not write the values logged so far, and tries again later: %s", name, error)
